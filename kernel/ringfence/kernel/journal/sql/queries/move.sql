-- name: branches
-- The branches of a copy have the numbers of the original: its rows name them.
insert into branches (agent, branch, parent, cut_step)
select %(agent)s, b.branch, b.parent, b.cut_step
from jsonb_to_recordset(%(branches)s) as b (branch integer, parent integer, cut_step bigint)
on conflict (agent, branch) do update set parent = excluded.parent, cut_step = excluded.cut_step

-- name: grants
-- Ids are the database's own; the order stays.
insert into grants (agent, origin, verdict, rule, created_by, created_at, expires_at, uses_left)
select %(agent)s, g.v ->> 'origin', g.v ->> 'verdict', g.v ->> 'rule', g.v ->> 'created_by',
    (g.v ->> 'created_at')::timestamptz, (g.v ->> 'expires_at')::timestamptz, (g.v ->> 'uses_left')::integer
from jsonb_array_elements(%(grants)s) with ordinality as g (v, nr) order by g.nr

-- name: fork_checkpoints
insert into checkpoints (agent, step, branch, lane_step, schema_version, next_child, state, digest, at)
select %(agent)s, c.step, c.branch, c.lane_step, c.schema_version, c.next_child, c.state, c.digest, c.at
from checkpoints c
join unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to) on c.branch = l.branch and c.step <= l.up_to
where c.agent = %(source)s

-- name: fork_memories
-- Its own texts; what lies in shared spaces is there for both.
insert into memories (agent, space, text, tags, metadata, words, step, branch, created_at)
select %(agent)s, m.space, m.text, m.tags, m.metadata, m.words, m.step, m.branch, m.created_at
from memories m
join unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to) on m.branch = l.branch and m.step <= l.up_to
where m.agent = %(source)s and m.space = '' order by m.key

-- name: fork_artifacts
insert into artifacts (agent, name, version, ref, media_type, size_bytes, step, branch, created_at)
select %(agent)s, f.name, f.version, f.ref, f.media_type, f.size_bytes, f.step, f.branch, f.created_at
from artifacts f
join unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to) on f.branch = l.branch and f.step <= l.up_to
where f.agent = %(source)s

-- name: fork_kin
-- A fork of an agent that was spawned has the same parent: its rights end where those of its original do.
insert into kin (child, parent, root, step, branch, depth, reserved)
select %(agent)s, k.parent, k.root, k.step, k.branch, k.depth, '{}' from kin k where k.child = %(source)s

-- name: fork_budgets
insert into budgets (agent, name, kind, amount, period_s, set_by, at)
select %(agent)s, b.name, b.kind, b.amount, b.period_s, b.set_by, b.at from budgets b where b.agent = %(source)s

-- name: removed
select at from removed where agent = %(agent)s
