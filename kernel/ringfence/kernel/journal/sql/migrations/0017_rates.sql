-- The rate of an upstream, over all kernels: what nobody has of it, which fills up like what somebody has. `spare`: calls that
-- could be made of it at `at`.
create table rate_lines (
    name  text primary key,
    spare double precision not null,
    at    timestamptz not null default clock_timestamp()
);

-- The part of the rate that one kernel goes by: so much of its count and of its refilling. Since `since` it wants one.
-- INVARIANT: the parts of a rate are at most 1 together, and a kernel has a call's worth or nothing.
create table rate_shares (
    name   text not null,
    kernel bigint not null,
    part   double precision not null default 0,
    since  timestamptz not null default clock_timestamp(),
    primary key (name, kernel)
);

-- Gives a kernel its part of a rate anew, an equal one for each that wants any. It has stopped to go by the one that it had, of
-- which `p_tokens` calls are left. A part grows only by what nobody has: `short` says that others have to give some up first, and
-- `gave` that this one did. Where there are more kernels than the rate has calls they take turns, one that `p_used` its part goes
-- last. What a dead kernel had left is nobody's: it may have used it.
create function rate_share(
    p_kernel bigint, p_name text, p_count double precision, p_span_s double precision, p_tokens double precision,
    p_want boolean, p_used boolean)
returns table (part double precision, tokens double precision, short boolean, gave boolean, crowded boolean)
language plpgsql as $$
declare
    line rate_lines;
    mine double precision;
    free double precision;
    others double precision;
    wanting integer;
    target double precision;
begin
    insert into rate_lines (name, spare) values (p_name, p_count) on conflict do nothing;
    select * into line from rate_lines l where l.name = p_name for update;
    select greatest(0, 1 - coalesce(sum(s.part), 0)), coalesce(sum(s.part) filter (where s.kernel = p_kernel), 0)
    into free, mine from rate_shares s where s.name = p_name;
    line.spare := least(free * p_count, line.spare
        + greatest(0, extract(epoch from clock_timestamp() - line.at)::float8) * free * p_count / p_span_s);
    delete from rate_shares s where s.name = p_name and s.kernel <> p_kernel and not exists (
        select from kernels n where n.key = s.kernel and n.released_at is null and n.lease_until > clock_timestamp());
    if p_want then
        insert into rate_shares (name, kernel) values (p_name, p_kernel) on conflict do nothing;
    else
        delete from rate_shares s where s.name = p_name and s.kernel = p_kernel;
    end if;
    select count(*), coalesce(sum(s.part) filter (where s.kernel <> p_kernel), 0)
    into wanting, others from rate_shares s where s.name = p_name;
    crowded := wanting > p_count;
    if crowded and p_used then
        update rate_shares s set since = clock_timestamp() where s.name = p_name and s.kernel = p_kernel;
    end if;
    target := case
        when not p_want then 0
        when not crowded then 1.0 / wanting
        when (select count(*) from rate_shares s join rate_shares m on m.name = s.name and m.kernel = p_kernel
            where s.name = p_name and (s.since, s.kernel) < (m.since, m.kernel)) < floor(p_count) then 1.0 / floor(p_count)
        else 0 end;
    part := least(target, greatest(0, 1 - others));
    if part * p_count < 1 - 1e-9 then
        part := 0;
    end if;
    short := part < target - 1e-9;
    gave := part < mine - 1e-9;
    tokens := greatest(0, least(p_tokens, mine * p_count));
    if part > mine then
        -- What became free since is nobody's yet, so it has no calls.
        free := greatest(0, 1 - others - mine);
        tokens := tokens + line.spare * (part - mine) / greatest(free, part - mine);
        line.spare := line.spare * greatest(0, free - (part - mine)) / greatest(free, part - mine);
    elsif tokens > part * p_count then
        line.spare := line.spare + tokens - part * p_count;
        tokens := part * p_count;
    end if;
    update rate_shares s set part = rate_share.part where s.name = p_name and s.kernel = p_kernel;
    update rate_lines l set spare = line.spare, at = clock_timestamp() where l.name = p_name;
    return next;
end $$;
