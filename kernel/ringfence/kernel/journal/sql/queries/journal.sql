-- name: steps
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and step > %(after)s and phase in (0, 1)
order by pos limit %(limit)s

-- name: step
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal where chain = %(chain)s and step = %(step)s order by pos

-- name: lineage
-- asked by 8: chain bigint, branches integer[], cuts bigint[], after_step bigint, after_pos bigint
select j.chain, j.pos, j.phase, j.step, j.branch, j.lane, j.lane_step, j.action, j.resource, j.effect, j.verdict,
    j.outcome, j.digest, j.effect_id, j.started_us, j.duration_us, j.body, j.hash
from journal j
join unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to)
    on j.branch = l.branch and j.step <= l.up_to
where j.chain = %(chain)s and j.phase = 1 and (j.step, j.pos) > (%(after_step)s, %(after_pos)s)
    and j.step >= %(after_step)s
order by j.step, j.pos limit %(limit)s

-- name: done_by
select step, branch from journal
where chain = %(chain)s and step > 0 and phase = 1 and outcome <> 'parked' and started_us + duration_us <= %(at_us)s
    and position('"aside":true'::bytea in body) = 0
order by step desc, pos desc limit 1

-- name: active_since
select distinct chain from journal
where chain > 0 and step > 0 and phase in (0, 1) and started_us + duration_us > %(at_us)s
    and position('"inherited":'::bytea in body) = 0
order by chain

-- name: rollback_intent
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and phase = 0 and action = 'rollback' and lane = 'op'
    and position(convert_to(%(group)s, 'UTF8') in body) > 0
order by pos desc limit 1

-- name: reads_since
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where started_us >= %(since_us)s and chain > 0 and chain <> all (%(without)s::bigint[]) and phase = 1 and outcome = 'ok'
    and action in ('state.get', 'state.transaction', 'memory.search', 'sql.read')
    and (action <> 'state.get' or resource = any (%(keys)s::text[]))
order by chain, pos limit %(limit)s

-- name: unfinished
-- asked by 16: chain bigint
select distinct on (i.step) i.chain, i.pos, i.phase, i.step, i.branch, i.lane, i.lane_step, i.action, i.resource,
    i.effect, i.verdict, i.outcome, i.digest, i.effect_id, i.started_us, i.duration_us, i.body, i.hash
from journal i
where i.chain = %(chain)s and i.phase = 0
    and not exists (
        select from journal o where o.chain = i.chain and o.step = i.step and o.phase = 1 and o.outcome <> 'parked')
order by i.step, i.pos desc

-- name: progress
select distinct on (step) chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome,
    digest, effect_id, started_us, duration_us, body, hash
from journal where chain = %(chain)s and phase = 2 and step = any (%(steps)s::bigint[])
order by step, pos desc

-- name: counts
-- asked by 64: chain bigint, after bigint
-- What was decided as allowed is spent, whatever became of it, except what a later check refused before it ran.
-- Totals are those of one run: of steps after the last one before it. Steps that left the journal are carried.
select greatest(l.max_step, c.max_step) as max_step, l.steps + c.steps as steps, l.calls + c.calls as calls,
    l.destructive + c.destructive as destructive, l.external + c.external as external, l.denied + c.denied as denied,
    l.unfinished
from (
    select coalesce(max(s.step), 0)::bigint as max_step,
        count(*) filter (where s.step > 0)::bigint as steps,
        count(*) filter (where s.spent and s.step > %(after)s)::bigint as calls,
        count(*) filter (where s.spent and s.destroy and s.step > %(after)s)::bigint as destructive,
        count(*) filter (where s.spent and s.external)::bigint as external,
        count(*) filter (where s.denied)::bigint as denied,
        count(*) filter (where s.open)::bigint as unfinished
    from (
        select step,
            bool_or(verdict in ('allow', 'ask') and outcome <> 'parked')
                and not bool_or(phase = 1 and outcome in ('denied', 'refused')) as spent,
            bool_or(effect = 'DESTROY') as destroy,
            bool_or(effect = 'EXTERNAL') as external,
            bool_or(verdict = 'deny' or outcome = 'denied') as denied,
            not bool_or(phase = 1 and outcome <> 'parked') as open
        from journal where chain = %(chain)s and phase in (0, 1) and step > 0
        group by step) s) l
cross join (
    select coalesce(max(last_step), 0) as max_step, coalesce(sum(steps), 0)::bigint as steps,
        coalesce(sum(calls) filter (where run >= %(after)s), 0)::bigint as calls,
        coalesce(sum(destructive) filter (where run >= %(after)s), 0)::bigint as destructive,
        coalesce(sum(external), 0)::bigint as external, coalesce(sum(denied), 0)::bigint as denied
    from carried where chain = %(chain)s) c

-- name: effect_ids
-- Pages of steps: a step's last row says what became of it.
select distinct on (step) effect_id, step, outcome
from journal
where chain = %(chain)s and step > %(after)s and phase in (0, 1) and effect_id <> ''
    and starts_with(effect_id, %(prefix)s)
order by step, pos desc limit %(limit)s

-- name: audit_chain
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and pos > %(pos)s
order by pos limit %(limit)s

-- name: first_since
select min(pos) from journal where chain = %(chain)s and started_us >= %(since_us)s

-- name: chains
-- All chains in ascending order, by skipping along the primary key; kernels' own, being negative, come first.
with recursive c (chain) as (
    (select chain from journal order by chain limit 1)
    union all
    select (select j.chain from journal j where j.chain > c.chain order by j.chain limit 1) from c where c.chain is not null)
select chain from c where chain is not null order by chain

-- name: heads
with recursive c (chain) as (
    (select chain from journal order by chain limit 1)
    union all
    select (select j.chain from journal j where j.chain > c.chain order by j.chain limit 1) from c where c.chain is not null)
select c.chain, h.pos, h.hash
from c cross join lateral (select pos, hash from journal j where j.chain = c.chain order by pos desc limit 1) h

-- name: hash_at
select hash from journal where chain = %(chain)s and pos = %(pos)s

-- name: anchor
insert into anchors (kernel, pos, hash, heads_digest, signature)
values (%(kernel)s, %(pos)s, %(hash)s, %(heads_digest)s, %(signature)s) on conflict do nothing

-- name: amounts
-- asked by 64: chain bigint, after bigint, every boolean
-- What calls used of amounts, and what those without an outcome still hold. Where bytes are not counted only calls of models do.
-- Steps that left the journal are carried.
select l.tokens + c.tokens as tokens, l.usd + c.usd as usd, l.bytes + c.bytes as bytes, l.held_tokens, l.held_usd, l.held_bytes
from (
    select coalesce(sum((a.amounts ->> 'tokens')::float8) filter (where a.phase = 1), 0)::float8 as tokens,
        coalesce(sum((a.amounts ->> 'usd')::float8) filter (where a.phase = 1), 0)::float8 as usd,
        coalesce(sum((a.amounts ->> 'bytes')::float8) filter (where a.phase = 1), 0)::float8 as bytes,
        coalesce(sum((a.amounts ->> 'bytes')::float8) filter (where a.phase = 0), 0)::float8 as held_bytes,
        coalesce(sum((a.amounts ->> 'tokens')::float8) filter (where a.phase = 0), 0)::float8 as held_tokens,
        coalesce(sum((a.amounts ->> 'usd')::float8) filter (where a.phase = 0), 0)::float8 as held_usd
    from (
        select distinct on (step) step, phase,
            case when substring(body for 6) in ('{"rese', '{"used', '{"fact') then body_amounts(body) end as amounts
        from journal
        where chain = %(chain)s and phase in (0, 1) and step > %(after)s
            and (%(every)s or starts_with(action, 'llm.')) and outcome <> 'parked'
        order by step, phase desc, pos desc) a) l
cross join (
    select coalesce(sum(tokens), 0) as tokens, coalesce(sum(usd), 0) as usd, coalesce(sum(bytes), 0) as bytes
    from carried where chain = %(chain)s and run >= %(after)s) c

-- name: last_event
-- Events have no step of their own, so they are found by the index of steps.
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and step = 0 and phase = 3 and action = %(action)s
order by pos desc limit 1
