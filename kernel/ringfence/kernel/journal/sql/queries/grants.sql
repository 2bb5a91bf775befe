-- name: list
-- asked by 64: agent bigint, active boolean
select key, agent, origin, verdict, rule, created_at, created_by, expires_at, uses_left, revoked_at
from grants
where agent = %(agent)s and (not %(active)s
    or (revoked_at is null and (expires_at is null or expires_at > clock_timestamp())
        and (uses_left is null or uses_left > 0)))
order by key

-- name: add
select key, agent, origin, verdict, rule, created_at, created_by, expires_at, uses_left, revoked_at
from add_grant(%(agent)s, %(verdict)s, %(rule)s, %(by)s, %(expires_at)s, %(uses)s)

-- name: revoke
select key, agent, origin, verdict, rule, created_at, created_by, expires_at, uses_left, revoked_at
from revoke_grants(%(agent)s, %(grants)s)

-- name: epoch
select epoch from agents where key = %(agent)s

-- name: use
update grants set uses_left = uses_left - 1
where key = %(grant)s and revoked_at is null and uses_left > 0
returning uses_left

-- name: uses_left
select uses_left from grants where key = %(grant)s and revoked_at is null

-- name: ack
with a as (update agents set acked_epoch = greatest(acked_epoch, %(epoch)s) where key = %(agent)s),
    r as (insert into acks (agent, epoch, report) values (%(agent)s, %(epoch)s, %(report)s) on conflict do nothing)
select pg_notify('ringfence_ack', json_build_object('agent', %(agent)s, 'epoch', %(epoch)s)::text)

-- name: acked
-- The report of the first acknowledgement that covers the epoch, and whether the owner still has a lease.
select
    (select report from acks where agent = a.key and epoch >= %(epoch)s order by epoch limit 1) as report,
    exists (select from kernels n where n.key = a.owner and n.fence > 0 and n.released_at is null
        and n.lease_until > clock_timestamp()) as owned
from agents a where a.key = %(agent)s
