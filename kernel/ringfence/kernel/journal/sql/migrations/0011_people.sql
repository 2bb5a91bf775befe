-- An approval may need several people, and not who submitted the agent; receivers outside are told of what waits for them.
alter table agents add column submitted_by text not null default '';
alter table approvals add column people integer not null default 1;
alter table approvals add column not_by text not null default '';
alter table approvals add column votes jsonb not null default '[]';

-- Receivers of events, as the kernels that share this database declare them; a kernel takes back what its data directory
-- declared before and does not any more.
create table webhooks (
    name          text primary key,
    events        text[] not null,
    host          text not null,
    data_dir      text not null,
    delivered_at  timestamptz,
    failing_since timestamptz,
    last_error    text not null default '',
    dropped       bigint not null default 0
);

-- Events that wait to be delivered, written by the transaction that they tell of. `next_at` is also the lease of whoever
-- sends it: until then nobody else does.
create table outbox (
    key        bigint generated always as identity primary key,
    webhook    text not null references webhooks on delete cascade,
    message    text not null,
    body       jsonb not null,
    attempts   integer not null default 0,
    created_at timestamptz not null default clock_timestamp(),
    next_at    timestamptz not null default clock_timestamp()
);
create index outbox_due on outbox (webhook, next_at);

-- Puts an event into the outbox of every receiver that wants it.
create function announce(p_event text, p_agent bigint, p_data jsonb) returns void language sql as $$
    insert into outbox (webhook, message, body)
    select w.name, e.message, jsonb_build_object(
        'type', p_event,
        'timestamp', to_char(clock_timestamp() at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
        'data', jsonb_build_object('agent', a.id, 'name', a.name) || p_data)
    from webhooks w
    join agents a on a.key = p_agent
    cross join (select 'msg_' || replace(gen_random_uuid()::text, '-', '') as message) e
    where p_event = any (w.events)
$$;

-- What a receiver learns of an approval: no arguments, no diff, and of a URL no query, which may hold what is nobody's business.
create function announce_approval() returns trigger language plpgsql as $$
declare
    event text;
begin
    if not exists (select from webhooks) then
        return null;
    elsif tg_op = 'INSERT' then
        event := 'approval.asked';
    elsif new.state <> old.state then
        event := 'approval.decided';
    elsif new.state = 'pending' and new.votes <> old.votes then
        event := 'approval.voted';
    else
        return null;
    end if;
    perform announce(event, new.agent, jsonb_build_object(
        'approval', 'a' || new.key, 'step', new.step, 'action', new.action,
        'resource', left(case when new.action like 'http.%' then split_part(new.resource, '?', 1) else new.resource end, 512),
        'effect', new.effect, 'digest', new.digest, 'state', new.state, 'people', new.people,
        'approved_by', (
            select coalesce(jsonb_agg(v.value -> 'by' order by v.nr), '[]')
            from jsonb_array_elements(new.votes) with ordinality as v (value, nr)
            where v.value ->> 'verdict' = 'approved' and not v.value ? 'void'),
        'edited', new.edited is not null,
        'expires_at', to_char(new.expires_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
        'decided_by', new.decided_by, 'reason', left(nullif(new.reason, ''), 512)));
    return null;
end $$;
create trigger announced after insert or update on approvals
    for each row execute function announce_approval();

-- An agent that needs a person. One that never ran has failed for nobody: it is a copy that is not whole yet.
create function announce_agent() returns trigger language plpgsql as $$
begin
    if new.state = 'failed' and old.state <> 'failed' and new.started_at is not null then
        perform announce('agent.failed', new.key, jsonb_build_object('error', left(new.error, 512)));
    elsif new.state = 'unknown' and old.state <> 'unknown' then
        perform announce('agent.unknown', new.key, jsonb_build_object('waiting_for', left(new.waiting_for, 512)));
    elsif new.state = 'parked' and new.waiting_for like 'budget %' and (old.state, old.waiting_for) <> (new.state, new.waiting_for) then
        perform announce('agent.budget', new.key, jsonb_build_object('waiting_for', left(new.waiting_for, 512)));
    end if;
    return null;
end $$;
create trigger announced after update of state, waiting_for on agents
    for each row when (new.state in ('failed', 'unknown', 'parked')) execute function announce_agent();
