-- name: register
insert into kernels (id, host, pid, boot_id, data_dir, fence, lease_until)
values (%(id)s, %(host)s, %(pid)s, %(boot_id)s, %(data_dir)s, nextval('fences'),
    clock_timestamp() + make_interval(secs => %(lease_s)s))
returning key, fence

-- name: heartbeat
update kernels set lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
where key = %(kernel)s and fence = %(fence)s and released_at is null
returning key

-- name: release
update kernels set released_at = clock_timestamp(), lease_until = least(lease_until, clock_timestamp())
where key = %(kernel)s and fence = %(fence)s and released_at is null

-- name: list
select key, id, host, pid, boot_id, data_dir, fence, lease_until, started_at, released_at,
    lease_until > clock_timestamp() as alive
from kernels order by key

-- name: claim
select key, id, name, thread, labels, branch, state, waiting_for, error, manifest, source, input, epoch, acked_epoch,
    owner, uid, restarts, exit_code, created_at, started_at, ended_at, asleep, wake_at
from claim_agents(%(kernel)s, %(fence)s, %(limit)s, %(ids)s::text[])

-- name: may_claim
select 1 from kernels where key = %(kernel)s and fence = %(fence)s and lease_until > clock_timestamp()

-- name: lock_agent
select pg_advisory_xact_lock(%(agent)s)

-- name: release_agent
update agents set owner = null where key = %(agent)s and owner = %(kernel)s

-- The lock puts this before whoever takes the agent over next, so that its number is larger.
-- name: tenure
with own as (select key from agents where key = %(agent)s and owner = %(kernel)s for share)
select nextval('fences') from own

-- name: version
show server_version
