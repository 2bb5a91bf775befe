-- Parts of chains that were moved to files of the archive, which hold all of their rows. Some rows stay in the journal as well:
-- `kept` says of each its position, the hash of the row before it, and its own. `behind` is the step of the checkpoint that a
-- part lies behind. A part without its file was given up at `pruned_at`.
create table segments (
    chain      bigint not null,
    first_pos  bigint not null,
    last_pos   bigint not null,
    first_step bigint not null,
    last_step  bigint not null,
    behind     bigint not null,
    rows       integer not null,
    since_us   bigint not null,
    until_us   bigint not null,
    size_bytes bigint not null,
    before     bytea not null,
    hash       bytea not null,
    sha256     bytea not null,
    kept       bytea not null,
    place      text not null,
    at         timestamptz not null default clock_timestamp(),
    pruned_at  timestamptz,
    primary key (chain, first_pos)
);

-- What was spent by steps that left the journal: by run (the last step before it) and by the hour in which they had ended.
create table carried (
    chain       bigint not null,
    run         bigint not null,
    ended_us    bigint not null,
    last_step   bigint not null,
    steps       bigint not null,
    calls       bigint not null,
    destructive bigint not null,
    external    bigint not null,
    denied      bigint not null,
    tokens      double precision not null,
    usd         double precision not null,
    bytes       double precision not null,
    primary key (chain, run, ended_us)
);

create or replace function journal_append_only() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and current_setting('ringfence.archiving', true) = 'on' then
        return null;
    end if;
    raise exception 'the journal is append-only';
end $$;

-- Moves rows out of the journal that a file holds: notes the part, carries what they spent, and removes them, all or nothing.
-- Answers how many were removed; null: this kernel may not write the chain, and nothing was done.
create function journal_archive(p_kernel bigint, p_fence bigint, p_part jsonb, p_gone bigint[]) returns integer
language plpgsql as $$
declare
    part segments := jsonb_populate_record(null::segments, p_part || jsonb_build_object('at', clock_timestamp()));
    gone integer;
begin
    perform pg_advisory_xact_lock_shared(part.chain);
    if not exists (select from agents a where a.key = part.chain and a.owner = p_kernel)
        or not exists (select from kernels n
            where n.key = p_kernel and n.fence = p_fence and n.lease_until > clock_timestamp()) then
        return null;
    end if;
    insert into segments select part.*;
    insert into carried as c (chain, run, ended_us, last_step, steps, calls, destructive, external, denied, tokens, usd, bytes)
    select part.chain, s.run, s.ended_us, max(s.step), count(*), count(*) filter (where s.spent),
        count(*) filter (where s.spent and s.destroy), count(*) filter (where s.spent and s.external),
        count(*) filter (where s.denied), coalesce(sum((s.amounts ->> 'tokens')::float8), 0),
        coalesce(sum((s.amounts ->> 'usd')::float8), 0), coalesce(sum((s.amounts ->> 'bytes')::float8), 0)
    from (
        select j.step, (select coalesce(max(b.cut_step), 0) from branches b
                where b.agent = part.chain and b.parent is null and b.cut_step < j.step) as run,
            -- The end of the hour: what ended in it counts as long as any of it may.
            (max(j.started_us + j.duration_us) / 3600000000 + 1) * 3600000000 as ended_us,
            bool_or(j.verdict in ('allow', 'ask') and j.outcome <> 'parked')
                and not bool_or(j.phase = 1 and j.outcome in ('denied', 'refused')) as spent,
            bool_or(j.effect = 'DESTROY') as destroy,
            bool_or(j.effect = 'EXTERNAL') as external,
            bool_or(j.verdict = 'deny' or j.outcome = 'denied') as denied,
            (array_agg(case when substring(j.body for 6) in ('{"used', '{"fact') then body_amounts(j.body) end order by j.pos desc)
                filter (where j.phase = 1 and j.outcome <> 'parked'))[1] as amounts
        from journal j
        where j.chain = part.chain and j.pos = any (p_gone) and j.phase in (0, 1) and j.step > 0
        group by j.step) s
    group by s.run, s.ended_us
    on conflict (chain, run, ended_us) do update set last_step = greatest(c.last_step, excluded.last_step),
        steps = c.steps + excluded.steps, calls = c.calls + excluded.calls, destructive = c.destructive + excluded.destructive,
        external = c.external + excluded.external, denied = c.denied + excluded.denied,
        tokens = c.tokens + excluded.tokens, usd = c.usd + excluded.usd, bytes = c.bytes + excluded.bytes;
    perform set_config('ringfence.archiving', 'on', true);
    delete from journal j where j.chain = part.chain and j.pos = any (p_gone);
    get diagnostics gone = row_count;
    perform set_config('ringfence.archiving', 'off', true);
    if gone <> cardinality(p_gone) then
        raise exception 'the rows to archive are not all there';
    end if;
    return gone;
end $$;

-- What an agent used of a total, with what calls without an outcome hold: of calls that ended since a time, or did not end.
-- What left the journal counts by the hour. A call that began before and ended after counts whole: too much is kept rather than too little.
create or replace function pool_recount(p_agent bigint, p_name text, p_since_us bigint) returns double precision
language sql stable as $$
    select case when p_name in ('calls', 'destructive') then (
        select count(*) filter (where s.spent and (p_name = 'calls' or s.destroy) and (s.open or s.ended_us >= p_since_us))
        from (
            select bool_or(verdict in ('allow', 'ask') and outcome <> 'parked')
                    and not bool_or(phase = 1 and outcome in ('denied', 'refused')) as spent,
                bool_or(effect = 'DESTROY') as destroy,
                not bool_or(phase = 1 and outcome <> 'parked') as open,
                max(started_us + duration_us) as ended_us
            from journal where chain = p_agent and phase in (0, 1) and step > 0 group by step) s)::float8
        + (select coalesce(sum(case p_name when 'calls' then c.calls else c.destructive end), 0)
            from carried c where c.chain = p_agent and c.ended_us >= p_since_us)::float8
    else (
        select coalesce(sum((a.amounts ->> p_name)::float8), 0)
        from (
            select distinct on (step) phase, started_us + duration_us as ended_us, body_amounts(body) as amounts
            from journal
            where chain = p_agent and phase in (0, 1) and (p_name = 'bytes' or starts_with(action, 'llm.'))
                and outcome <> 'parked'
            order by step, phase desc, pos desc) a
        where a.phase = 0 or a.ended_us >= p_since_us)
        + (select coalesce(sum(case p_name when 'tokens' then c.tokens when 'usd' then c.usd else c.bytes end), 0)
            from carried c where c.chain = p_agent and c.ended_us >= p_since_us)
    end
$$;

-- Whether no rollback of an agent comes back to before a step of its: it was archived, or the agent was removed.
create function message_settled(p_agent bigint, p_step bigint) returns boolean language sql stable as $$
    select exists (select from removed r where r.agent = p_agent)
        or p_step <= (select coalesce(max(s.behind), 0) from segments s where s.chain = p_agent)
$$;
