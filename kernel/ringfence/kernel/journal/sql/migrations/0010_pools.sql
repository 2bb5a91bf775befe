-- Budgets of many agents together. One row per total and window: what all shares have taken of it. `closes` null: never.
create table pools (
    pool   text not null,
    name   text not null,
    opens  timestamptz not null,
    closes timestamptz,
    taken  double precision not null default 0,
    primary key (pool, name, opens)
);

-- What one agent has taken of a pool: what it used, what its calls under way hold (`held` is both, when it was last said, and
-- `busy` the latter), and a remainder that its kernel gives out without asking. Only `kernel` may change it. Since
-- `since_us`, by the clock of the kernel that opened it, the journal knows what was used.
-- INVARIANT: pools.taken is the sum of its shares, so it never passes the limit that a share was taken under.
create table pool_shares (
    pool     text not null,
    name     text not null,
    opens    timestamptz not null,
    agent    bigint not null,
    kernel   bigint not null,
    amount   double precision not null default 0,
    held     double precision not null default 0,
    busy     double precision not null default 0,
    since_us bigint not null,
    primary key (pool, name, opens, agent)
);
-- Adoption asks for those of one agent.
create index pool_shares_agent on pool_shares (agent);

-- Limits that an operator set for a pool, in place of the kernel file's.
create table pool_limits (
    pool   text not null,
    name   text not null,
    amount double precision not null check (amount >= 0),
    set_by text not null,
    at     timestamptz not null default clock_timestamp(),
    primary key (pool, name)
);

-- What a call of a model `reserved` or `used`, from the head of its body, where only the marks of taint may come before.
-- Nothing else is read: what an agent wrote comes later and is never taken for it.
create function body_amounts(p_body bytea) returns jsonb language sql immutable as $$
    select substring(convert_from(substring(p_body for 16384), 'LATIN1') from
        '^\{(?:"facts":\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\})*\},)?"(?:reserved|used)":(\{[^}]*\})')::jsonb
$$;

-- What an agent used of a total, with what calls without an outcome hold: of calls that ended since a time, or did not end.
-- A call that began before and ended after counts whole: too much is kept rather than too little.
create function pool_recount(p_agent bigint, p_name text, p_since_us bigint) returns double precision
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
    else (
        select coalesce(sum((a.amounts ->> p_name)::float8), 0)
        from (
            select distinct on (step) phase, started_us + duration_us as ended_us, body_amounts(body) as amounts
            from journal
            where chain = p_agent and phase in (0, 1) and starts_with(action, 'llm.') and outcome <> 'parked'
            order by step, phase desc, pos desc) a
        where a.phase = 0 or a.ended_us >= p_since_us)
    end
$$;

-- Makes a kernel the holder of an agent's share and answers its amount. One that is there is counted again from the journal:
-- what an earlier holder had not given out goes back. Answers null where somebody else owns the agent: only its owner may add
-- to what is counted. One that has ended anybody may count.
create function pool_open(
    p_kernel bigint, p_agent bigint, p_pool text, p_name text, p_opens timestamptz, p_closes timestamptz, p_now_us bigint)
returns double precision language plpgsql as $$
declare
    share pool_shares;
    counted double precision;
begin
    if not exists (select from agents a where a.key = p_agent
        and (a.owner = p_kernel or a.state in ('done', 'failed', 'killed'))) then
        return null;
    end if;
    insert into pools (pool, name, opens, closes) values (p_pool, p_name, p_opens, p_closes) on conflict do nothing;
    perform from pools p where p.pool = p_pool and p.name = p_name and p.opens = p_opens for update;
    select * into share from pool_shares s
    where s.pool = p_pool and s.name = p_name and s.opens = p_opens and s.agent = p_agent;
    if not found then
        insert into pool_shares (pool, name, opens, agent, kernel, since_us)
        values (p_pool, p_name, p_opens, p_agent, p_kernel, p_now_us);
        return 0;
    end if;
    counted := pool_recount(
        p_agent, p_name, greatest(share.since_us, (extract(epoch from p_opens) * 1000000)::bigint));
    update pool_shares s set kernel = p_kernel, amount = counted, held = counted, busy = 0
    where s.pool = p_pool and s.name = p_name and s.opens = p_opens and s.agent = p_agent;
    update pools p set taken = p.taken + counted - share.amount
    where p.pool = p_pool and p.name = p_name and p.opens = p_opens;
    return counted;
end $$;

-- Changes shares that a kernel holds: each to `keep`, and `ask` more, and perhaps up to `more` on top, as far as `limit` goes.
-- Where `ask` does not fit nothing is added. Answers, by the place of the move, what the share has now (null: another
-- kernel's) and what is taken of the pool.
create function pool_move(p_kernel bigint, p_moves jsonb)
returns table (nr integer, amount double precision, taken double precision)
language plpgsql as $$
declare
    m record;
    mine double precision;
    room double precision;
begin
    for m in
        select (t.item ->> 'pool') as pool, (t.item ->> 'name') as name, (t.item ->> 'opens')::timestamptz as opens,
            (t.item ->> 'agent')::bigint as agent, (t.item ->> 'keep')::float8 as keep, (t.item ->> 'held')::float8 as held,
            (t.item ->> 'busy')::float8 as busy, (t.item ->> 'ask')::float8 as ask, (t.item ->> 'more')::float8 as more,
            (t.item ->> 'limit')::float8 as cap, t.place::integer - 1 as place
        from jsonb_array_elements(p_moves) with ordinality t (item, place)
        order by 1, 2, 3, 4
    loop
        nr := m.place;
        select p.taken into taken from pools p where p.pool = m.pool and p.name = m.name and p.opens = m.opens for update;
        select s.amount into mine from pool_shares s
        where s.pool = m.pool and s.name = m.name and s.opens = m.opens and s.agent = m.agent and s.kernel = p_kernel;
        amount := null;
        if mine is not null then
            room := m.cap - (taken - mine) - m.keep;
            amount := m.keep;
            if m.ask <= room + 1e-9 then
                amount := m.keep + m.ask;
                room := greatest(0, least(m.more, (room - m.ask) / 16));
                amount := amount + case when m.name = 'usd' then room else floor(room) end;
            end if;
            update pool_shares s set amount = pool_move.amount, held = m.held, busy = m.busy
            where s.pool = m.pool and s.name = m.name and s.opens = m.opens and s.agent = m.agent;
            taken := taken + amount - mine;
            update pools p set taken = pool_move.taken
            where p.pool = m.pool and p.name = m.name and p.opens = m.opens;
        end if;
        return next;
    end loop;
end $$;
