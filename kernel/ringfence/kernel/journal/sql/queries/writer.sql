-- name: session
-- Answers promise durability, so only a setting that breaks it is changed. A writer that stalls inside a transaction
-- holds agents' locks and would hold up a revocation: the server ends it.
select set_config('synchronous_commit',
        case current_setting('synchronous_commit') when 'off' then 'on' else current_setting('synchronous_commit') end, false),
    set_config('idle_in_transaction_session_timeout', '5s', false),
    set_config('statement_timeout', '15s', false),
    set_config('client_encoding', 'UTF8', false),
    set_config('default_transaction_isolation', 'read committed', false),
    set_config('plan_cache_mode', 'force_generic_plan', false),
    set_config('jit', 'off', false),
    -- Everything here is a handful of keys against a large table: look each up by its index.
    set_config('enable_hashjoin', 'off', false),
    set_config('enable_mergejoin', 'off', false)

-- name: row_type
select 'journal'::regtype::oid::bigint

-- name: began
select floor(extract(epoch from backend_start) * 1000000)::bigint from pg_stat_activity where pid = pg_backend_pid()

-- name: end_session
-- Ends the lost connection's session, if it still runs, and waits for that. A reused pid has another start.
select pg_terminate_backend(pid, 5000) from pg_stat_activity
where pid = $1::bigint and floor(extract(epoch from backend_start) * 1000000)::bigint = $2::bigint
    and pid <> pg_backend_pid()

-- name: begin
begin

-- name: commit
commit

-- name: rollback
rollback

-- name: savepoint
savepoint work

-- name: release
release work

-- name: undo
rollback to work

-- name: append
select key, epoch, owned from journal_append($1::bigint, $2::bigint, $3::bigint[], $4::bigint[], $5::journal[])

-- name: lock_one
select pg_advisory_xact_lock_shared($1::bigint)

-- name: lock_agents
-- In the order of the array, which is ascending in every flush.
select pg_advisory_xact_lock_shared(a.key) from unnest($1::bigint[]) as a (key)

-- name: append_one
-- A row, behind lock_one of its agent in the same transaction. Inserts nothing when it may not be written.
insert into journal select ($5::journal).*
from agents a, kernels n
where a.key = $3::bigint and a.owner = $1::bigint and a.epoch = coalesce($4::bigint, a.epoch)
    and n.key = $1::bigint and n.fence = $2::bigint and n.lease_until > clock_timestamp()

-- name: append_some
-- The same with several rows of one agent.
insert into journal select r.*
from unnest($5::journal[]) r, agents a, kernels n
where a.key = $3::bigint and a.owner = $1::bigint and a.epoch = coalesce($4::bigint, a.epoch)
    and n.key = $1::bigint and n.fence = $2::bigint and n.lease_until > clock_timestamp()

-- name: append_put
-- A row with one new version of one key, behind lock_one in the same transaction. The update locks the key, and
-- looks again at its version where it had to wait for it. Does nothing when the agent may not be written or the version is another.
with advanced as (
    update state set version = $7::bigint, value = $8::bytea, agent = $9::text, step = $10::bigint, at = clock_timestamp()
    from agents a, kernels n
    where state.key = $6::text and state.version = $5::bigint
        and a.key = $3::bigint and a.owner = $1::bigint and a.epoch = coalesce($4::bigint, a.epoch)
        and n.key = $1::bigint and n.fence = $2::bigint and n.lease_until > clock_timestamp()
    returning state.key
), recorded as (
    insert into state_history (key, version, value, agent, step)
    select $6::text, $7::bigint, $8::bytea, $9::text, $10::bigint from advanced
)
insert into journal select ($11::journal).* from advanced

-- name: append_changes
-- Rows with their changes of the state, behind the locks of agents and keys in the same transaction. Does nothing when an agent may not be
-- written or a key is at another version than was reckoned with.
with allowed as (
    select from (select) as once
    where (select count(*) from unnest($3::bigint[], $4::bigint[]) as w (key, epoch)
            join agents a on a.key = w.key and a.owner = $1::bigint and a.epoch = coalesce(w.epoch, a.epoch)
        ) = cardinality($3::bigint[])
        and exists (select from kernels n
            where n.key = $1::bigint and n.fence = $2::bigint and n.lease_until > clock_timestamp())
        and (select count(*) from unnest($6::text[], $7::bigint[]) as h (key, version)
            join state s on s.key = h.key and s.version = h.version
        ) = cardinality($6::text[])
), recorded as (
    insert into state_history (key, version, value, agent, step)
    select v.* from unnest($8::text[], $9::bigint[], $10::bytea[], $11::text[], $12::bigint[]) as v, allowed
), advanced as (
    update state set version = n.version, value = n.value, agent = n.agent, step = n.step, at = clock_timestamp()
    from allowed, unnest($13::text[], $14::bigint[], $15::bytea[], $16::text[], $17::bigint[])
        as n (key, version, value, agent, step)
    where state.key = n.key
)
insert into journal select r.* from unnest($5::journal[]) as r, allowed

-- name: insert
-- Rows that may be written for sure: checked before in this transaction, or of the kernel's own chain.
insert into journal select * from unnest($1::journal[])

-- name: check
select key, epoch, owned from journal_check($1::bigint, $2::bigint, $3::bigint[])

-- name: heads
select c.chain, coalesce(j.pos, 0), j.hash, coalesce(a.id, '')
from unnest($1::bigint[]) as c (chain)
left join lateral (select pos, hash from journal where chain = c.chain order by pos desc limit 1) j on true
left join agents a on a.key = c.chain

-- name: hash_at
select hash from journal where chain = $1::bigint and pos = $2::bigint

-- name: copy
copy journal from stdin (format binary); commit

-- name: hold
insert into state (key, version) select k, 0 from unnest($1::text[]) with ordinality as h (k, nr) order by h.nr
on conflict do nothing

-- name: lock
select key, version, value is not null, agent, step from state where key = any ($1::text[])
order by key collate "C" for update

-- name: hold_claims
insert into claims (key) select k from unnest($1::text[]) with ordinality as h (k, nr) order by h.nr on conflict do nothing

-- name: lock_claims
-- Whose each is while the transaction lasts: what is live here stays so until it ends, for nobody else gets past the lock.
select c.key, c.fence, coalesce(c.until > clock_timestamp() and a.state not in ('done', 'failed', 'killed'), false), coalesce(a.id, ''), c.step
from claims c left join agents a on a.key = c.agent where c.key = any ($1::text[])
order by c.key collate "C" for update of c

-- name: record
insert into state_history (key, version, value, agent, step)
select * from unnest($1::text[], $2::bigint[], $3::bytea[], $4::text[], $5::bigint[])

-- name: advance
update state set version = n.version, value = n.value, agent = n.agent, step = n.step, at = clock_timestamp()
from unnest($1::text[], $2::bigint[], $3::bytea[], $4::text[], $5::bigint[]) as n (key, version, value, agent, step)
where state.key = n.key

-- name: checkpoint
-- With a position, only where the row of its outcome was written there before in this transaction; 0: it is known that it may be.
insert into checkpoints (agent, step, branch, lane_step, schema_version, next_child, packing, base, state, digest)
select $1::bigint, $2::bigint, $3::bigint, $4::bigint, $5::bigint, $6::bigint, $7::bigint, nullif($8::bigint, 0), $9::bytea, $10::bytea
where $11::bigint = 0 or exists (select from journal where chain = $1::bigint and pos = $11::bigint)
