-- name: create
with k as (select nextval(pg_get_serial_sequence('agents', 'key')) as key)
insert into agents (key, id, name, thread, labels, manifest, source, input, owner, uid, submitted_by)
overriding system value
select k.key, %(id)s, %(name)s, %(thread)s, %(labels)s, %(manifest)s, %(source)s, %(input)s, %(owner)s,
    %(uid_base)s::integer + k.key, %(submitted_by)s
from k
returning key, id, name, thread, labels, branch, state, waiting_for, error, manifest, source, input, epoch, acked_epoch,
    owner, uid, restarts, exit_code, created_at, started_at, ended_at, asleep, wake_at

-- name: first_branch
insert into branches (agent, branch) values (%(agent)s, 0)

-- name: first_grants
insert into grants (agent, origin, verdict, rule, created_by)
select %(agent)s, 'manifest', g.verdict, g.rule, 'manifest'
from unnest(%(verdicts)s::text[], %(rules)s::text[]) with ordinality as g (verdict, rule, nr) order by g.nr

-- name: find
select key, id, name, thread, labels, branch, state, waiting_for, error, manifest, source, input, epoch, acked_epoch,
    owner, uid, restarts, exit_code, created_at, started_at, ended_at, asleep, wake_at
from agents
where id = %(word)s or (name = %(word)s and not exists (select from removed r where r.agent = agents.key)) order by key desc

-- name: by_key
-- asked by 64: key bigint
select key, id, name, thread, labels, branch, state, waiting_for, error, manifest, source, input, epoch, acked_epoch,
    owner, uid, restarts, exit_code, created_at, started_at, ended_at, asleep, wake_at
from agents where key = %(key)s

-- name: list
select key, id, name, thread, labels, branch, state, waiting_for, error, manifest, source, input, epoch, acked_epoch,
    owner, uid, restarts, exit_code, created_at, started_at, ended_at, asleep, wake_at
from agents
where state not in ('done', 'failed', 'killed') or (%(all)s and not exists (select from removed r where r.agent = agents.key))
order by key

-- name: set
-- Of each of these agents, no one twice: a key that is absent from its patch leaves its column; a JSON null empties it. What waits
-- for a person ends with an agent that is killed, in the same transaction.
with patched as (select * from unnest(%(keys)s::bigint[], %(patches)s::jsonb[]) as p (agent, j)),
closed as (
    update approvals a set state = 'voided', decided_at = clock_timestamp(), decided_by = 'the kernel', reason = 'the agent was killed'
    from patched p where a.agent = p.agent and a.state = 'pending' and p.j ->> 'state' = 'killed')
update agents set
    state = coalesce(p.j ->> 'state', state),
    waiting_for = coalesce(p.j ->> 'waiting_for', waiting_for),
    error = coalesce(p.j ->> 'error', error),
    restarts = coalesce((p.j ->> 'restarts')::integer, restarts),
    branch = coalesce((p.j ->> 'branch')::integer, branch),
    exit_code = case when p.j ? 'exit_code' then (p.j ->> 'exit_code')::integer else exit_code end,
    started_at = case when p.j ? 'started_at' then (p.j ->> 'started_at')::timestamptz else started_at end,
    ended_at = case
        when p.j ? 'ended_at' then (p.j ->> 'ended_at')::timestamptz
        when p.j ->> 'state' in ('done', 'failed', 'killed') then coalesce(ended_at, now())
        when p.j ? 'state' then null
        else ended_at
    end,
    asleep = coalesce((p.j ->> 'asleep')::boolean, asleep),
    wake_at = case when p.j ? 'wake_at' then (p.j ->> 'wake_at')::timestamptz else wake_at end
from patched p
where key = p.agent

-- name: branches
-- asked by 64: agent bigint
select branch, parent, cut_step, created_at from branches where agent = %(agent)s order by branch

-- name: lock_row
select key from agents where key = %(agent)s for update

-- name: add_branch
insert into branches (agent, branch, parent, cut_step)
select %(agent)s, coalesce(max(branch), -1) + 1, %(parent)s, %(cut_step)s from branches where agent = %(agent)s
returning branch, parent, cut_step, created_at

-- name: set_branch
update agents set branch = %(branch)s where key = %(agent)s

-- name: checkpoint
-- asked by 4: agent bigint, before bigint, branches integer[], cuts bigint[]
-- The newest first, then what it rests on down to the whole state.
with recursive chain as (
    (
        select c.*
        from checkpoints c
        join unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to)
            on c.branch = l.branch and c.step <= l.up_to
        where c.agent = %(agent)s and (%(before)s::bigint is null or c.step < %(before)s)
        order by c.step desc limit 1
    )
    union all
    select c.* from chain join checkpoints c on c.agent = chain.agent and c.step = chain.base
)
select step, branch, lane_step, schema_version, next_child, packing, state, digest from chain order by step desc

-- name: forget
-- Only an agent that nothing was ever recorded of: the journal is never cut.
with gone as (
    select a.key from agents a where a.key = %(key)s and not exists (select from journal j where j.chain = a.key)
), no_grants as (
    delete from grants using gone where grants.agent = gone.key
), no_branches as (
    delete from branches using gone where branches.agent = gone.key
), no_schedule as (
    delete from schedules using gone where schedules.agent = gone.key
), no_acks as (
    delete from acks using gone where acks.agent = gone.key
)
delete from agents using gone where agents.key = gone.key returning agents.key

-- name: submitter
select submitted_by from agents where key = %(key)s
