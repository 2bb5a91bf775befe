-- Work that is committed together with the outcome that asked for it. Each takes one jsonb: the call's values, and who calls as
-- agent (agents.key), agent_id, lane, step and branch. Each answers one jsonb, and has changed nothing where that is a conflict or again.

-- name: approval_open
-- A call waits for a person. Its step waits for one at a time.
insert into approvals (agent, step, branch, lane, lane_step, action, resource, effect, arguments, digest, asks, versions,
    detail, expires_at, people, not_by)
select ($1::jsonb ->> 'agent')::bigint, ($1::jsonb ->> 'step')::bigint, ($1::jsonb ->> 'branch')::integer, $1::jsonb ->> 'lane',
    ($1::jsonb ->> 'lane_step')::integer, $1::jsonb ->> 'action', $1::jsonb ->> 'resource', $1::jsonb ->> 'effect', $1::jsonb ->> 'arguments',
    $1::jsonb ->> 'digest', $1::jsonb -> 'asks', $1::jsonb -> 'versions', $1::jsonb -> 'detail', ($1::jsonb ->> 'expires_at')::timestamptz,
    ($1::jsonb ->> 'people')::integer, $1::jsonb ->> 'not_by'
returning jsonb_build_object('key', key)

-- name: approval_close
-- The call came to an end before anyone had decided.
update approvals set state = 'voided', decided_at = clock_timestamp(), decided_by = 'the kernel', reason = $1::jsonb ->> 'reason'
where key = ($1::jsonb ->> 'key')::bigint and state = 'pending'
returning jsonb_build_object('key', key)

-- name: message_send
-- To an id, or to the one agent of this name that has not ended.
with q as (select $1::jsonb as j),
named as (select a.* from q join agents a on a.id = q.j ->> 'to'),
found as (
    select * from named
    union all
    select a.* from q join agents a on a.name = q.j ->> 'to' where not exists (select from named)
),
live as (select * from found where state not in ('done', 'failed', 'killed')),
chosen as (select key, id, owner from live where (select count(*) from live) = 1),
waiting as (
    select count(*) as messages from (
        select from chosen c join messages m on m.recipient = c.key, q
        where m.taken_step is null and m.voided_at is null limit (select (j ->> 'most')::integer from q)) w
),
sent as (
    insert into messages (recipient, sender, sender_name, sender_key, sender_step, sender_branch, is_json, body)
    select c.key, coalesce(q.j ->> 'sender', q.j ->> 'agent_id'), coalesce(a.name, q.j ->> 'sender_name', 'operator'), a.key,
        case when a.key is not null then (q.j ->> 'step')::bigint end,
        case when a.key is not null then (q.j ->> 'branch')::integer end,
        (q.j ->> 'is_json')::boolean, q.j ->> 'body'
    from q join chosen c on true join waiting w on w.messages < (q.j ->> 'most')::integer
    left join agents a on a.key = (q.j ->> 'agent')::bigint
    returning key
)
select case
    when exists (select from sent) then
        jsonb_build_object('message', (select key from sent), 'to', c.id, 'wake', jsonb_build_array(c.key, c.owner))
    when c.key is not null then jsonb_build_object('full', w.messages, 'to', c.id)
    when exists (select from live) then jsonb_build_object('several', (select jsonb_agg(id order by key) from live))
    when exists (select from found) then
        jsonb_build_object('ended', (select id from found order by key desc limit 1),
            'state', (select state from found order by key desc limit 1))
    else '{"missing": true}'::jsonb end
from waiting w left join chosen c on true

-- name: hook_deliver
-- What a hook was given goes into one mailbox, once for each id of its sender. What had that id before is answered for, and nothing is done.
with q as (select $1::jsonb as j),
had as (select d.digest, d.message, a.id as recipient from q join deliveries d on d.hook = q.j ->> 'hook' and d.id = q.j ->> 'id'
    join agents a on a.key = d.agent),
chosen as (select a.key, a.id, a.owner, a.state from q join agents a on a.id = q.j ->> 'to'),
waiting as (
    select count(*) as messages from (
        select from chosen c join messages m on m.recipient = c.key, q
        where m.taken_step is null and m.voided_at is null limit (select (j ->> 'most')::integer from q)) w
),
sent as (
    insert into messages (recipient, sender, sender_name, is_json, body, untrusted)
    select c.key, q.j ->> 'sender', q.j ->> 'sender', (q.j ->> 'is_json')::boolean, q.j ->> 'body', true
    from q join chosen c on c.state not in ('done', 'failed', 'killed') join waiting w on w.messages < (q.j ->> 'most')::integer
    where not exists (select from had)
    returning key
),
kept as (
    insert into deliveries (hook, id, digest, agent, message)
    select q.j ->> 'hook', q.j ->> 'id', decode(q.j ->> 'digest', 'hex'), c.key, s.key from q, chosen c, sent s
)
select case
    when exists (select from had) then jsonb_build_object('had', (select encode(digest, 'hex') from had),
        'message', (select message from had), 'to', (select recipient from had))
    when exists (select from sent) then
        jsonb_build_object('message', (select key from sent), 'to', c.id, 'wake', jsonb_build_array(c.key, c.owner))
    when c.key is null then '{"missing": true}'::jsonb
    when c.state in ('done', 'failed', 'killed') then jsonb_build_object('ended', c.id, 'state', c.state)
    else jsonb_build_object('full', w.messages, 'to', c.id) end
from waiting w left join chosen c on true

-- name: task_ask
-- A client gives an agent a task, or answers in one.
select task_ask($1::jsonb)

-- name: task_update
-- An agent tells of a task.
select task_update($1::jsonb)

-- name: task_cancel
-- A client wants nothing more of a task.
select task_cancel($1::jsonb)

-- name: message_take
with q as (select $1::jsonb as j),
oldest as (
    select m.key from q join messages m on m.recipient = (q.j ->> 'agent')::bigint
    where m.taken_step is null and m.voided_at is null and (q.j ->> 'from' = '' or q.j ->> 'from' in (m.sender, m.sender_name))
    order by m.key limit 1 for update of m
),
taken as (
    update messages m
    set taken_step = (q.j ->> 'step')::bigint, taken_branch = (q.j ->> 'branch')::integer, taken_at = clock_timestamp()
    from oldest, q where m.key = oldest.key
    returning m.*
),
noted as (insert into message_takes (message, step, branch) select key, taken_step, taken_branch from taken)
select coalesce((select jsonb_build_object('id', key, 'from', sender, 'from_name', sender_name, 'is_json', is_json, 'body', body,
    'sent_at_us', floor(extract(epoch from sent_at) * 1000000)::bigint,
    -- Whether it is from outside, or its sender was tainted: that stands first in the row that sent it.
    'tainted', untrusted or exists (select from journal j where j.chain = sender_key and j.step = sender_step and j.phase = 1
        and substring(j.body from 1 for 14) = '{"facts":{"tai'::bytea)) from taken), '{"again": true}'::jsonb)

-- name: memory_append
with q as (select $1::jsonb as j)
insert into memories (agent, space, text, tags, metadata, words, step, branch)
select (j ->> 'agent')::bigint, j ->> 'space', j ->> 'text',
    array(select jsonb_array_elements_text(j -> 'tags')), j ->> 'metadata',
    to_tsvector((j ->> 'language')::regconfig, j ->> 'text'), (j ->> 'step')::bigint, (j ->> 'branch')::integer
from q
returning to_jsonb(key)

-- name: artifact_put
with q as (select $1::jsonb as j)
insert into artifacts (agent, name, version, ref, media_type, size_bytes, step, branch)
select (j ->> 'agent')::bigint, j ->> 'name',
    1 + coalesce((select max(a.version) from artifacts a
        where a.agent = (j ->> 'agent')::bigint and a.name = j ->> 'name'), 0),
    j ->> 'ref', j ->> 'media_type', (j ->> 'size_bytes')::bigint, (j ->> 'step')::bigint, (j ->> 'branch')::integer
from q
returning jsonb_build_object('version', version)

-- name: agent_remove
-- What of an agent can be forgotten, and nothing half: only one that has ended, once. Grants are marked as all grants are;
-- messages stay as rows without their text, for the rollbacks of those who sent them.
with q as (select $1::jsonb as j),
ended as (
    select a.key from agents a join q on a.key = (q.j ->> 'agent')::bigint
    where a.state in ('done', 'failed', 'killed')
        and not exists (select from kin k join agents c on c.key = k.child
            where k.parent = a.key and c.state not in ('done', 'failed', 'killed'))),
gone as (
    insert into removed (agent, by) select e.key, q.j ->> 'by' from ended e cross join q on conflict do nothing returning agent),
closed as (
    update approvals p set state = 'voided', decided_at = clock_timestamp(), decided_by = q.j ->> 'by',
        reason = 'the agent was removed'
    from gone, q where p.agent = gone.agent and p.state = 'pending' returning p.key),
emptied as (
    update messages m set voided_at = case when m.taken_step is null then coalesce(m.voided_at, clock_timestamp()) else m.voided_at end,
        body = case when m.is_json then 'null' else '' end
    from gone where m.recipient = gone.agent returning m.key),
no_memories as (delete from memories m using gone where m.agent = gone.agent and m.space = '' returning 1),
no_artifacts as (delete from artifacts f using gone where f.agent = gone.agent returning 1),
no_tasks as (delete from tasks t using gone where t.agent = gone.agent returning 1),
no_checkpoints as (delete from checkpoints c using gone where c.agent = gone.agent returning 1),
no_budgets as (delete from budgets b using gone where b.agent = gone.agent returning 1),
no_schedule as (delete from schedules s using gone where s.agent = gone.agent returning 1),
no_rights as (
    update grants g set revoked_at = clock_timestamp() from gone where g.agent = gone.agent and g.revoked_at is null returning 1)
select case when exists (select from gone) then jsonb_build_object(
    'approvals', (select count(*) from closed), 'messages', (select count(*) from emptied),
    'memories', (select count(*) from no_memories), 'tasks', (select count(*) from no_tasks), 'artifacts', (select count(*) from no_artifacts),
    'checkpoints', (select count(*) from no_checkpoints), 'budgets', (select count(*) from no_budgets),
    'schedules', (select count(*) from no_schedule), 'grants', (select count(*) from no_rights)) end

-- name: spawn
-- The child's row, its branch, its grants and its place in the family. Its key was taken from the sequence before, for its
-- files are made before the commit. An id that is taken: again, with another one.
with q as (select $1::jsonb as j),
me as (
    select a.key, a.owner, a.submitted_by, coalesce(k.root, a.key) as root, coalesce(k.depth, 0) + 1 as depth
    from q join agents a on a.key = (q.j ->> 'agent')::bigint left join kin k on k.child = a.key
),
living as (
    select count(*) filter (where k.parent = me.key) as own, count(*) as tree
    from me join kin k on k.root = me.root join agents a on a.key = k.child
    where a.state not in ('done', 'failed', 'killed')
),
free as (
    select me.* from q, me, living
    where me.depth <= (q.j ->> 'depth_most')::integer and living.own < (q.j ->> 'own_most')::integer
        and living.tree < (q.j ->> 'tree_most')::integer
),
born as (
    insert into agents (key, id, name, thread, labels, manifest, source, input, owner, uid, submitted_by)
    overriding system value
    select (j ->> 'key')::bigint, j ->> 'id', j ->> 'name', j ->> 'thread', j -> 'labels', j ->> 'manifest',
        j ->> 'source', decode(j ->> 'input', 'base64'), free.owner, (j ->> 'uid')::integer, free.submitted_by
    from q, free
    on conflict do nothing
    returning key, id, name
),
first_branch as (insert into branches (agent, branch) select key, 0 from born),
first_grants as (
    insert into grants (agent, origin, verdict, rule, created_by)
    select born.key, 'manifest', g.value ->> 0, g.value ->> 1, 'manifest'
    from q, born, jsonb_array_elements(q.j -> 'grants') with ordinality as g (value, nr) order by g.nr
),
placed as (
    insert into kin (child, parent, root, step, branch, depth, reserved)
    select born.key, free.key, free.root, (q.j ->> 'step')::bigint, (q.j ->> 'branch')::integer, free.depth, q.j -> 'reserved'
    from q, born, free
)
select case
    when exists (select from born) then (select jsonb_build_object('id', id, 'name', name, 'key', key) from born)
    when exists (select from free) then '{"again": true}'::jsonb
    else (select jsonb_build_object('depth', me.depth, 'own', living.own, 'tree', living.tree) from me, living) end

-- name: claim_take
-- Free is what nobody holds, what ran out, whose holder has ended, and what the same lane of the same agent holds: a program that
-- starts again takes its own claim anew, and what it did under the old one is fenced off.
with q as (select $1::jsonb as j),
held as (
    select c.key, a.id, c.lane, c.step, c.until,
        coalesce(c.until > clock_timestamp() and a.state not in ('done', 'failed', 'killed')
            and (c.agent, c.lane) is distinct from ((q.j ->> 'agent')::bigint, q.j ->> 'lane'), false) as live
    from q join claims c on c.key = q.j ->> 'key' left join agents a on a.key = c.agent),
taken as (
    update claims c set fence = c.fence + 1, agent = (q.j ->> 'agent')::bigint, lane = q.j ->> 'lane', step = (q.j ->> 'step')::bigint,
        until = clock_timestamp() + (q.j ->> 'ttl_ms')::bigint * interval '1 ms'
    from q, held h where c.key = h.key and not h.live
    returning c.fence, c.until)
select coalesce(
    (select jsonb_build_object('fence', fence, 'until_us', floor(extract(epoch from until) * 1000000)::bigint) from taken),
    (select jsonb_build_object('by', id, 'lane', lane, 'step', step, 'until_us', floor(extract(epoch from until) * 1000000)::bigint)
        from held))

-- name: claim_renew
-- Also one that ran out, as long as nobody has taken it.
with q as (select $1::jsonb as j),
renewed as (
    update claims c set until = clock_timestamp() + (q.j ->> 'ttl_ms')::bigint * interval '1 ms'
    from q where c.key = q.j ->> 'key' and c.agent = (q.j ->> 'agent')::bigint and c.fence = (q.j ->> 'fence')::bigint
    returning c.until)
select coalesce(
    (select jsonb_build_object('until_us', floor(extract(epoch from until) * 1000000)::bigint) from renewed),
    (select jsonb_build_object('fence', c.fence, 'by', a.id, 'step', c.step)
        from q join claims c on c.key = q.j ->> 'key' left join agents a on a.key = c.agent))

-- name: claim_release
with q as (select $1::jsonb as j),
released as (
    update claims c set agent = null, until = null
    from q where c.key = q.j ->> 'key' and c.agent = (q.j ->> 'agent')::bigint and c.fence = (q.j ->> 'fence')::bigint
    returning 1)
select jsonb_build_object('released', exists (select from released))
