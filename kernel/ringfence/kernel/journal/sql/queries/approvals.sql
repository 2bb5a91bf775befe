-- name: get
select * from approvals where key = %(key)s

-- name: pending
-- Those that wait, of all agents or of one, oldest first.
select p.* from approvals p join agents a on a.key = p.agent
where (%(all)s or p.state = 'pending') and (%(agent)s::bigint is null or p.agent = %(agent)s)
order by p.key desc limit %(limit)s

-- name: unfinished
-- What waits, and what was approved and has not come to its end, of one agent.
select p.* from approvals p
where p.agent = %(agent)s and p.state in ('pending', 'approved')
    and not exists (select from journal o where o.chain = p.agent and o.step = p.step and o.phase = 1 and o.outcome <> 'parked')
    and not exists (select from approvals later where later.agent = p.agent and later.step = p.step and later.key > p.key)
order by p.step

-- name: granted
-- Approvals that a step of an agent has had, with what asked.
select * from approvals where agent = %(agent)s and step = %(step)s and state = 'approved' order by key

-- name: withdraw
-- Whatever was said of it holds no longer: of one, or (key null) of all of an agent that wait at a step after the given one.
update approvals set state = 'voided', reason = %(reason)s, decided_at = clock_timestamp(), decided_by = 'the kernel'
where (key = %(key)s and state in ('pending', 'approved'))
    or (%(key)s::bigint is null and agent = %(agent)s and step > %(after)s and state = 'pending')
returning *

-- name: decide
-- Once: whoever comes second finds what was decided. One that has run out of time is nobody's to approve any more.
with d as (
    update approvals set state = %(state)s, decided_at = clock_timestamp(), decided_by = %(by)s, reason = %(reason)s,
        edited = coalesce(%(edited)s, edited),
        good_until = clock_timestamp() + %(for_ms)s::bigint * interval '1 millisecond'
    where key = %(key)s and state = 'pending' and (%(state)s <> 'approved' or expires_at > clock_timestamp())
    returning *)
select d.* from d, lateral (select pg_notify('ringfence_approval', json_build_object('agent', d.agent, 'key', d.key)::text)) n

-- name: standing
-- What was approved for longer than once, for the same call of the same agent.
select * from approvals
where agent = %(agent)s and action = %(action)s and digest = %(digest)s and state = 'approved' and good_until > clock_timestamp()
order by key desc

-- name: end_standing
-- It holds for no further call; what ran under it stays approved.
update approvals set good_until = clock_timestamp() where key = %(key)s and good_until > clock_timestamp() returning *
