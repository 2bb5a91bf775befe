-- name: get
select * from approvals where key = %(key)s

-- name: pending
-- Those that wait, of all agents or of one, oldest first.
select p.* from approvals p join agents a on a.key = p.agent
where (%(all)s or p.state = 'pending') and (%(agent)s::bigint is null or p.agent = %(agent)s)
order by p.key desc limit %(limit)s

-- name: unfinished
-- asked by 16: agent bigint
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
-- Once: whoever comes second finds what was decided. What a person says is kept with it, and no message of theirs counts twice.
with d as (
    update approvals set state = %(state)s, decided_at = clock_timestamp(), decided_by = %(by)s, reason = %(reason)s,
        votes = votes || case when %(vote)s::jsonb is null then '[]' else jsonb_build_array(%(vote)s::jsonb) end
    where key = %(key)s and state = 'pending'
        and not (%(message)s::text <> '' and votes @> jsonb_build_array(jsonb_build_object('message', %(message)s::text)))
    returning *)
select d.* from d, lateral (select pg_notify('ringfence_approval', json_build_object('agent', d.agent, 'key', d.key)::text)) n

-- name: vote
-- One person's approval of certain arguments; those of others for other arguments are void from here on. It is approved when
-- enough people approve the same. The row lock makes votes one after the other, so none is lost. One that has run out of
-- time is nobody's to approve any more.
with l as (
    select * from approvals
    where key = %(key)s and state = 'pending' and expires_at > clock_timestamp()
        and not (%(message)s::text <> '' and votes @> jsonb_build_array(jsonb_build_object('message', %(message)s::text)))
    for update),
c as (
    select l.key, l.people, v.value || case
        when not v.value ? 'void' and (v.value ->> 'edited') is distinct from %(edited)s::text then jsonb_build_object('void', %(by)s::text)
        else '{}' end as value, v.nr
    from l, jsonb_array_elements(l.votes || jsonb_build_array(%(vote)s::jsonb)) with ordinality as v (value, nr)),
n as (
    select key, people, jsonb_agg(value order by nr) as votes,
        count(distinct value ->> 'by') filter (where not value ? 'void') as approving,
        string_agg(value ->> 'by', ', ' order by nr) filter (where not value ? 'void') as by,
        coalesce(string_agg(nullif(value ->> 'reason', ''), '; ' order by nr) filter (where not value ? 'void'), '') as reason,
        bool_and(value ? 'for_ms') filter (where not value ? 'void') as standing,
        min((value ->> 'for_ms')::bigint) filter (where not value ? 'void') as for_ms
    from c group by key, people
    having count(*) filter (where value ->> 'by' = %(by)s::text and not value ? 'void') = 1),
d as (
    update approvals a set votes = n.votes,
        state = case when n.approving >= n.people then 'approved' else a.state end,
        decided_at = case when n.approving >= n.people then clock_timestamp() end,
        decided_by = case when n.approving >= n.people then n.by end,
        reason = case when n.approving >= n.people then n.reason else '' end,
        edited = case when n.approving >= n.people then %(edited)s::text end,
        good_until = case when n.approving >= n.people and n.standing
            then clock_timestamp() + n.for_ms * interval '1 millisecond' end
    from n where a.key = n.key
    returning a.*)
select d.* from d, lateral (
    select case when d.state = 'approved'
        then pg_notify('ringfence_approval', json_build_object('agent', d.agent, 'key', d.key)::text)::text end) n

-- name: standing
-- What was approved for longer than once, for the same call of the same agent.
select * from approvals
where agent = %(agent)s and action = %(action)s and digest = %(digest)s and state = 'approved' and good_until > clock_timestamp()
order by key desc

-- name: end_standing
-- It holds for no further call; what ran under it stays approved.
update approvals set good_until = clock_timestamp() where key = %(key)s and good_until > clock_timestamp() returning *
