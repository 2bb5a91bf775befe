-- Tasks that clients give to agents by A2A. The id begins with the client's name.
create table tasks (
    id         text primary key,
    agent      bigint not null references agents on delete cascade,
    client     text not null,
    context    text not null,
    state      text not null default 'submitted',
    events     integer not null default 0,
    bytes      bigint not null default 0, -- of what was asked and told
    created_at timestamptz not null default clock_timestamp(),
    updated_at timestamptz not null default clock_timestamp()
);
create index tasks_client on tasks (client, updated_at desc, id);
create index tasks_open on tasks (agent) where state not in ('completed', 'failed', 'canceled', 'rejected');

-- What was asked and told of a task, in order.
create table task_events (
    task     text not null references tasks on delete cascade,
    seq      integer not null,
    kind     text not null, -- asked, told, result, canceled
    state    text not null, -- of the task after it
    is_json  boolean not null,
    body     text,
    artifact text not null default '',
    at       timestamptz not null default clock_timestamp(),
    primary key (task, seq)
);

-- What clients sent, by the id that they gave it: none is put into a mailbox twice.
create table task_messages (
    client     text not null,
    agent      bigint not null references agents on delete cascade,
    message_id text not null,
    digest     bytea not null,
    task       text not null references tasks on delete cascade,
    message    bigint not null,
    primary key (client, agent, message_id)
);
create index task_messages_task on task_messages (task);

-- Adds to what was told of a task.
create function task_note(p_task text, p_kind text, p_state text, j jsonb) returns void language plpgsql as $$
declare
    n integer;
begin
    update tasks set state = p_state, events = events + 1, bytes = bytes + coalesce(octet_length(j ->> 'body'), 0),
        updated_at = clock_timestamp()
    where id = p_task returning events into n;
    insert into task_events (task, seq, kind, state, is_json, body, artifact)
    values (p_task, n, p_kind, p_state, coalesce((j ->> 'is_json')::boolean, false), j ->> 'body', coalesce(j ->> 'artifact', ''));
end $$;

-- A client sends a message: a task begins with it, or goes on. What had its id before is answered for, and nothing is done.
create function task_ask(j jsonb) returns jsonb language plpgsql as $$
declare
    a agents;
    t tasks;
    had task_messages;
    waiting integer;
    sent bigint;
begin
    select * into a from agents where id = j ->> 'to';
    if not found then
        return '{"missing": true}';
    end if;
    select * into had from task_messages m where m.client = j ->> 'client' and m.agent = a.key and m.message_id = j ->> 'message_id';
    if found then
        return jsonb_build_object('had', encode(had.digest, 'hex'), 'task', had.task);
    end if;
    if a.state in ('done', 'failed', 'killed') then
        return jsonb_build_object('ended', a.id, 'state', a.state);
    end if;
    select count(*) into waiting from (
        select from messages m where m.recipient = a.key and m.taken_step is null and m.voided_at is null limit (j ->> 'most')::integer) w;
    if waiting >= (j ->> 'most')::integer then
        return jsonb_build_object('full', waiting, 'to', a.id);
    end if;
    if (j ->> 'begins')::boolean then
        select count(*) into waiting from (
            select from tasks o where o.agent = a.key and o.state not in ('completed', 'failed', 'canceled', 'rejected')
            limit (j ->> 'open_most')::integer) w;
        if waiting >= (j ->> 'open_most')::integer then
            return jsonb_build_object('busy', waiting, 'to', a.id);
        end if;
        insert into tasks (id, agent, client, context) values (j ->> 'task', a.key, j ->> 'client', j ->> 'context') returning * into t;
    else
        select * into t from tasks o where o.id = j ->> 'task' and o.client = j ->> 'client' and o.agent = a.key for update;
        if not found then
            return '{"unknown": true}';
        elsif t.state in ('completed', 'failed', 'canceled', 'rejected') then
            return jsonb_build_object('over', t.state);
        elsif t.events >= (j ->> 'events_most')::integer or t.bytes >= (j ->> 'bytes_most')::bigint then
            return jsonb_build_object('long', t.events);
        end if;
    end if;
    insert into messages (recipient, sender, sender_name, is_json, body, untrusted)
    values (a.key, j ->> 'sender', j ->> 'sender', true, j ->> 'message', true) returning key into sent;
    perform task_note(t.id, 'asked', case when t.state in ('input-required', 'auth-required') then 'working' else t.state end, j);
    insert into task_messages (client, agent, message_id, digest, task, message)
    values (t.client, a.key, j ->> 'message_id', decode(j ->> 'digest', 'hex'), t.id, sent);
    return jsonb_build_object('task', t.id, 'message', sent, 'to', a.id, 'wake', jsonb_build_array(a.key, a.owner));
end $$;

-- An agent tells the client of one of its own tasks something.
create function task_update(j jsonb) returns jsonb language plpgsql as $$
declare
    t tasks;
    said text := coalesce(nullif(j ->> 'state', ''), '');
begin
    select * into t from tasks o where o.id = j ->> 'task' and o.agent = (j ->> 'agent')::bigint for update;
    if not found then
        return '{"missing": true}';
    elsif t.state in ('completed', 'failed', 'canceled', 'rejected') then
        return jsonb_build_object('ended', t.state);
    elsif (t.events >= (j ->> 'most')::integer or t.bytes >= (j ->> 'bytes_most')::bigint) and said not in ('completed', 'failed', 'rejected') then
        return jsonb_build_object('full', t.events);
    end if;
    said := coalesce(nullif(said, ''), case when t.state = 'submitted' then 'working' else t.state end);
    perform task_note(t.id, case when j ->> 'artifact' <> '' then 'result' else 'told' end, said, j);
    return jsonb_build_object('state', said);
end $$;

-- A client wants nothing more of a task; the agent is told.
create function task_cancel(j jsonb) returns jsonb language plpgsql as $$
declare
    a agents;
    t tasks;
begin
    select * into t from tasks o where o.id = j ->> 'task' and o.client = j ->> 'client' for update;
    if not found then
        return '{"unknown": true}';
    elsif t.state in ('completed', 'failed', 'canceled', 'rejected') then
        return jsonb_build_object('over', t.state);
    end if;
    perform task_note(t.id, 'canceled', 'canceled', '{}');
    select * into a from agents where key = t.agent;
    if a.state in ('done', 'failed', 'killed') then
        return jsonb_build_object('task', t.id);
    end if;
    insert into messages (recipient, sender, sender_name, is_json, body, untrusted)
    values (a.key, j ->> 'sender', j ->> 'sender', true, j ->> 'message', true);
    return jsonb_build_object('task', t.id, 'wake', jsonb_build_array(a.key, a.owner));
end $$;
