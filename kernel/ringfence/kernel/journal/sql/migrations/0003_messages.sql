-- Mailboxes. A message waits until it is taken; a rollback of its receiver puts it back, one of its sender voids it.
-- `sender_key`, `sender_step` and `sender_branch` are null for a message of an operator.
create table messages (
    key           bigint generated always as identity primary key,
    recipient     bigint not null references agents on delete cascade,
    sender        text not null,
    sender_name   text not null,
    sender_key    bigint,
    sender_step   bigint,
    sender_branch integer,
    is_json       boolean not null,
    body          text not null,
    sent_at       timestamptz not null default clock_timestamp(),
    taken_step    bigint,
    taken_branch  integer,
    taken_at      timestamptz,
    voided_at     timestamptz
);
-- What waits in a mailbox, oldest first.
create index messages_waiting on messages (recipient, key) where taken_step is null and voided_at is null;
-- Rollback asks what an agent sent, and what it took.
create index messages_sender on messages (sender_key, sender_step) where sender_key is not null;
create index messages_taken on messages (recipient, taken_step) where taken_step is not null;

-- Every taking ever: a message put back by a rollback may be taken again, and a rollback of that rollback has to know both.
create table message_takes (
    message bigint not null references messages on delete cascade,
    step    bigint not null,
    branch  integer not null,
    at      timestamptz not null default clock_timestamp(),
    primary key (message, step)
);

-- Texts that agents keep. `space` empty: the agent's own; else one that agents share. Hidden: appended after the cut of a rollback.
create table memories (
    key        bigint generated always as identity primary key,
    agent      bigint not null references agents on delete cascade,
    space      text not null,
    text       text not null,
    tags       text[] not null,
    metadata   text not null,
    words      tsvector not null,
    step       bigint not null,
    branch     integer not null,
    created_at timestamptz not null default clock_timestamp(),
    hidden     boolean not null default false
);
create index memories_words on memories using gin (words);
-- The newest of one space; and what one agent appended, for rollback.
create index memories_space on memories (space, key) where space <> '';
create index memories_agent on memories (agent, step);

-- Names of artifacts. The bytes lie in the blob store under `ref`. Hidden: put after the cut of a rollback.
create table artifacts (
    agent      bigint not null references agents on delete cascade,
    name       text not null,
    version    bigint not null,
    ref        text not null,
    media_type text not null,
    size_bytes bigint not null,
    step       bigint not null,
    branch     integer not null,
    created_at timestamptz not null default clock_timestamp(),
    hidden     boolean not null default false,
    primary key (agent, name, version)
);
create index artifacts_ref on artifacts (agent, ref);
create index artifacts_step on artifacts (agent, step);

-- Puts the mailboxes, memories and artifacts of an agent to how they stand on a lineage: branches, and the last step that
-- counts of each. Doing it twice changes nothing. Answers [kind, message, other agent] of every message that changed, and
-- as kind `taken` those that it sent after the cut and that somebody has: they can't be called back.
create function atoms_rewind(p_agent bigint, p_branches integer[], p_cuts bigint[], p_dry boolean)
returns table (kind text, item bigint, who text, name text) language plpgsql as $$
begin
    return query
        select case when t.step is null then 'returned' else 'taken again' end, m.key, m.sender, m.sender_name
        from messages m
        left join lateral (
            select max(k.step) as step from message_takes k
            join unnest(p_branches, p_cuts) as l (branch, up_to) on k.branch = l.branch and k.step <= l.up_to
            where k.message = m.key) t on true
        where m.recipient = p_agent and m.voided_at is null and t.step is distinct from m.taken_step
            and (m.taken_step is not null or exists (select from message_takes k where k.message = m.key))
        union all
        select case when m.taken_step is not null then 'taken' when m.voided_at is null then 'voided' else 'sent again' end,
            m.key, a.id, a.name
        from messages m join agents a on a.key = m.recipient
        cross join lateral (
            select exists (select from unnest(p_branches, p_cuts) as l (branch, up_to)
                where m.sender_branch = l.branch and m.sender_step <= l.up_to) as counts) c
        where m.sender_key = p_agent
            and case when m.taken_step is not null then not c.counts else c.counts = (m.voided_at is not null) end;
    if p_dry then
        return;
    end if;
    update messages m set taken_step = t.step, taken_branch = t.branch, taken_at = t.at
    from (
        select w.key, k.step, k.branch, k.at
        from messages w
        left join lateral (
            select k.step, k.branch, k.at from message_takes k
            join unnest(p_branches, p_cuts) as l (branch, up_to) on k.branch = l.branch and k.step <= l.up_to
            where k.message = w.key order by k.step desc limit 1) k on true
        where w.recipient = p_agent
            and (w.taken_step is not null or exists (select from message_takes h where h.message = w.key))) t
    where m.key = t.key and m.taken_step is distinct from t.step;
    update messages m set voided_at = case when c.counts then null else clock_timestamp() end
    from (
        select w.key, exists (select from unnest(p_branches, p_cuts) as l (branch, up_to)
            where w.sender_branch = l.branch and w.sender_step <= l.up_to) as counts
        from messages w where w.sender_key = p_agent) c
    where m.key = c.key and m.taken_step is null and c.counts = (m.voided_at is not null);
    update memories m set hidden = not m.hidden
    where m.agent = p_agent and m.hidden = exists (select from unnest(p_branches, p_cuts) as l (branch, up_to)
        where m.branch = l.branch and m.step <= l.up_to);
    update artifacts f set hidden = not f.hidden
    where f.agent = p_agent and f.hidden = exists (select from unnest(p_branches, p_cuts) as l (branch, up_to)
        where f.branch = l.branch and f.step <= l.up_to);
end $$;
