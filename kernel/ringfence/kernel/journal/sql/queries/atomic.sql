-- Work that is committed together with the outcome that asked for it. Each takes one jsonb: the call's values, and who calls as
-- agent (agents.key), agent_id, step and branch. Each answers one jsonb, and has changed nothing where that is a conflict or again.

-- name: approval_open
-- A call waits for a person. Its step waits for one at a time.
insert into approvals (agent, step, branch, lane, lane_step, action, resource, effect, arguments, digest, asks, versions,
    detail, expires_at)
select ($1::jsonb ->> 'agent')::bigint, ($1::jsonb ->> 'step')::bigint, ($1::jsonb ->> 'branch')::integer, $1::jsonb ->> 'lane',
    ($1::jsonb ->> 'lane_step')::integer, $1::jsonb ->> 'action', $1::jsonb ->> 'resource', $1::jsonb ->> 'effect', $1::jsonb ->> 'arguments',
    $1::jsonb ->> 'digest', $1::jsonb -> 'asks', $1::jsonb -> 'versions', $1::jsonb -> 'detail', ($1::jsonb ->> 'expires_at')::timestamptz
returning jsonb_build_object('key', key)

-- name: approval_close
-- The call came to an end before anyone had decided.
update approvals set state = 'voided', decided_at = clock_timestamp(), decided_by = 'the kernel', reason = $1::jsonb ->> 'reason'
where key = ($1::jsonb ->> 'key')::bigint and state = 'pending'
returning jsonb_build_object('key', key)
