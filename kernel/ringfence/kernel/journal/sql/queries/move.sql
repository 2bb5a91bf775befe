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
insert into checkpoints (agent, step, branch, lane_step, schema_version, next_child, state, digest, at, packing, base)
select %(agent)s, c.step, c.branch, c.lane_step, c.schema_version, c.next_child, c.state, c.digest, c.at, c.packing, c.base
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

-- name: export_checkpoints
select to_jsonb(c) - 'agent' as v from checkpoints c where c.agent = %(agent)s and c.step > %(after)s order by c.step limit %(limit)s

-- name: export_memories
select (to_jsonb(m) - 'agent') as v from memories m where m.agent = %(agent)s and m.space = '' and m.key > %(after)s
order by m.key limit %(limit)s

-- name: export_artifacts
select to_jsonb(f) - 'agent' as v from artifacts f where f.agent = %(agent)s order by f.name, f.version

-- name: export_messages
-- Who sent them is somebody else's agent: its id and name stay, its place in a journal doesn't, so whether they taint is said.
select to_jsonb(m) - '{recipient,sender_key,sender_step,sender_branch}'::text[] || jsonb_build_object(
    'untrusted', m.untrusted or exists (select from journal j where j.chain = m.sender_key and j.step = m.sender_step and j.phase = 1
        and substring(j.body from 1 for 14) = '{"facts":{"tai'::bytea), 'takes', coalesce((
    select jsonb_agg(to_jsonb(t) - 'message' order by t.step) from message_takes t where t.message = m.key), '[]')) as v
from messages m where m.recipient = %(agent)s and m.key > %(after)s order by m.key limit %(limit)s

-- name: export_budgets
select to_jsonb(b) - 'agent' as v from budgets b where b.agent = %(agent)s order by b.kind, b.name

-- name: import_checkpoints
-- A file of an earlier release says nothing of how they are packed: they are not.
insert into checkpoints select * from jsonb_populate_record(
    null::checkpoints, jsonb_build_object('packing', 0) || %(row)s || jsonb_build_object('agent', %(agent)s))

-- name: import_artifacts
insert into artifacts select * from jsonb_populate_record(null::artifacts, %(row)s || jsonb_build_object('agent', %(agent)s))

-- name: import_budgets
insert into budgets select * from jsonb_populate_record(null::budgets, %(row)s || jsonb_build_object('agent', %(agent)s))

-- name: import_memories
insert into memories (agent, space, text, tags, metadata, words, step, branch, created_at, hidden)
select %(agent)s, '', r.text, r.tags, r.metadata, r.words, r.step, r.branch, r.created_at, r.hidden
from jsonb_populate_record(null::memories, %(row)s) r

-- name: import_messages
with m as (
    insert into messages (recipient, sender, sender_name, is_json, body, sent_at, taken_step, taken_branch, taken_at, voided_at,
        untrusted)
    select %(agent)s, r.sender, r.sender_name, r.is_json, r.body, r.sent_at, r.taken_step, r.taken_branch, r.taken_at, r.voided_at,
        coalesce(r.untrusted, false)
    from jsonb_populate_record(null::messages, %(row)s) r
    returning key)
insert into message_takes (message, step, branch, at)
select m.key, t.step, t.branch, t.at
from m, jsonb_to_recordset(%(row)s -> 'takes') as t (step bigint, branch integer, at timestamptz)

-- name: layer_state
-- Keys whose present value is of this agent.
select jsonb_build_object('key', s.key, 'version', s.version, 'step', s.step, 'value', convert_from(s.value, 'UTF8')::jsonb) as v
from (select distinct key from state_history where agent = %(agent)s) h join state s on s.key = h.key
where s.agent = %(agent)s and s.value is not null order by s.key collate "C"

-- name: layer_claims
select jsonb_build_object('key', c.key, 'fence', c.fence, 'lane', c.lane, 'step', c.step, 'until', c.until,
    'held', c.until > clock_timestamp()) as v
from claims c join agents a on a.key = c.agent where a.id = %(agent)s order by c.key collate "C"
