-- Tasks of A2A clients, read.

-- name: found
-- Tasks of one client, newest first, with what their agents wait for. `page` goes on behind the last one seen.
select t.id, t.context,
    case when t.state = 'submitted' and exists (
        select from task_messages k join messages m on m.key = k.message where k.task = t.id and m.taken_step is not null)
        then 'working' else t.state end as state,
    t.events, t.bytes, t.created_at, t.updated_at, a.id as agent, a.state as agent_state, a.waiting_for as waits, a.error,
    (select jsonb_build_object('key', p.key, 'action', p.action, 'resource', p.resource) from approvals p
        where p.agent = t.agent and p.state = 'pending' order by p.key limit 1) as approval
from tasks t join agents a on a.key = t.agent
where t.client = %(client)s
    and (%(ids)s::text[] is null or t.id = any (%(ids)s))
    and (%(agent)s::text is null or a.id = %(agent)s)
    and (%(context)s = '' or t.context = %(context)s)
    and (%(since)s::timestamptz is null or t.updated_at > %(since)s)
    and (%(before)s::timestamptz is null or (t.updated_at, t.id) < (%(before)s, %(last)s))
order by t.updated_at desc, t.id desc
limit %(limit)s

-- name: count
select count(*) from tasks t join agents a on a.key = t.agent
where t.client = %(client)s and (%(agent)s::text is null or a.id = %(agent)s) and (%(context)s = '' or t.context = %(context)s)
    and (%(since)s::timestamptz is null or t.updated_at > %(since)s)

-- name: events
-- What was asked and told of a task, after an entry.
select seq, kind, state, is_json, body, artifact, at from task_events where task = %(task)s and seq > %(after)s order by seq limit %(limit)s

-- name: push_set
insert into task_pushes (task, id, url, token, scheme, credentials, seen)
select t.id, %(id)s, %(url)s, %(token)s, %(scheme)s, %(credentials)s, case when %(whole)s then 0 else t.events end
from tasks t
where t.id = %(task)s and (select count(*) from task_pushes p where p.task = t.id and p.id <> %(id)s) < %(most)s
on conflict (task, id) do update set url = excluded.url, token = excluded.token, scheme = excluded.scheme,
    credentials = excluded.credentials, attempts = 0, failing_since = null, last_error = '', next_at = clock_timestamp()
returning task

-- name: pushes
select id, url, token, scheme from task_pushes where task = %(task)s order by id

-- name: push_delete
delete from task_pushes where task = %(task)s and id = %(id)s

-- name: push_hurry
-- A kernel that starts tries at once what an earlier one was about to.
update task_pushes set next_at = clock_timestamp() where not over and next_at > clock_timestamp()

-- name: push_claim
-- Some of which something is to be told. Nobody else sends it until the lease is over.
update task_pushes q set next_at = clock_timestamp() + %(lease_s)s * interval '1 second', attempts = q.attempts + 1
from (
    select p.task, p.id, t.client, a.id as agent from task_pushes p join tasks t on t.id = p.task join agents a on a.key = t.agent
    where not p.over and p.next_at <= clock_timestamp() and (t.events > p.seen or
        (a.state in ('done', 'failed', 'killed') and t.state not in ('completed', 'failed', 'canceled', 'rejected')))
    order by p.next_at limit %(limit)s for update of p skip locked) due
where q.task = due.task and q.id = due.id
returning q.task, q.id, due.client, due.agent, q.url, q.token, q.scheme, q.credentials, q.seen, q.attempts,
    extract(epoch from clock_timestamp() - coalesce(q.failing_since, clock_timestamp()))::float8 as failing_s

-- name: push_told
update task_pushes set seen = %(seen)s, over = %(over)s, attempts = 0, failing_since = null, last_error = '', next_at = clock_timestamp()
where task = %(task)s and id = %(id)s

-- name: push_failed
update task_pushes set next_at = clock_timestamp() + %(delay_s)s * interval '1 second', over = %(over)s,
    failing_since = coalesce(failing_since, clock_timestamp()), last_error = %(error)s
where task = %(task)s and id = %(id)s
