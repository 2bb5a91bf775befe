-- The kernel's own tables. Locks: one bigint advisory lock per agent, its number is agents.key. Whoever writes an agent's
-- chain holds it shared until commit; whoever moves the agent's policy epoch or its owner holds it exclusively. So
-- an epoch or an owner read under the lock is still true when the rows commit. Several locks are taken in ascending order.

-- Fencing tokens. They only grow, over all kernels.
create sequence fences as bigint;

-- One row per start of a kernel; never reused. Its lease covers all agents it owns. A fence below zero: taken over from.
create table kernels (
    key         bigint generated always as identity primary key,
    id          text not null unique,
    host        text not null,
    pid         integer not null,
    boot_id     text not null,
    data_dir    text not null,
    fence       bigint not null,
    lease_until timestamptz not null,
    started_at  timestamptz not null default clock_timestamp(),
    released_at timestamptz
);

-- One row per agent. `key` numbers its chain and its lock.
create table agents (
    key         bigint generated always as identity primary key,
    id          text not null unique,
    name        text not null,
    thread      text not null,
    labels      jsonb not null default '{}',
    branch      integer not null default 0,
    state       text not null default 'pending' check (state in (
        'pending', 'running', 'waiting', 'parked', 'sleeping', 'paused', 'done', 'failed', 'killed', 'unknown')),
    waiting_for text not null default '',
    error       text not null default '',
    manifest    text not null,
    source      text not null,
    input       bytea not null,
    epoch       bigint not null default 1,
    acked_epoch bigint not null default 1,
    owner       bigint references kernels,
    uid         integer,
    restarts    integer not null default 0,
    exit_code   integer,
    created_at  timestamptz not null default clock_timestamp(),
    started_at  timestamptz,
    ended_at    timestamptz,
    asleep      boolean not null default false,
    wake_at     timestamptz,
    submitted_by text not null default '',
    home        text not null default '' -- data directory with its newest files, where these are in a shared store too
);
-- People say the name; several agents may have the same.
create index agents_name on agents (name);
-- Takeover looks for what a dead kernel left; agents that ended are never taken over and stay out of it.
create index agents_owner on agents (owner) where state not in ('done', 'failed', 'killed');

-- Branches of an agent's threads. The first branch of each run has no parent; its cut_step is the last step before the run.
create table branches (
    agent      bigint not null references agents,
    branch     integer not null,
    parent     integer,
    cut_step   bigint not null default 0,
    created_at timestamptz not null default clock_timestamp(),
    primary key (agent, branch)
);

-- Schedules of agents that have one. A run is a thread of its own on a branch without a parent.
create table schedules (
    agent        bigint primary key references agents,
    next_at      timestamptz,
    paused       boolean not null default false,
    running      boolean not null default false,
    runs         integer not null default 0,
    last_at      timestamptz,
    last_outcome text not null default '',
    last_error   text not null default '',
    queued       timestamptz[] not null default '{}',
    settled_at   timestamptz not null default clock_timestamp()
);

-- Stored, revocable permissions, and denies. Rows are marked, never removed.
create table grants (
    key        bigint generated always as identity primary key,
    agent      bigint not null references agents,
    origin     text not null check (origin in ('manifest', 'operator')),
    verdict    text not null check (verdict in ('allow', 'ask', 'deny')),
    rule       text not null,
    created_at timestamptz not null default clock_timestamp(),
    created_by text not null,
    expires_at timestamptz,
    uses_left  integer check (uses_left >= 0),
    revoked_at timestamptz
);
-- All grants of one agent, at every load of its policy.
create index grants_agent on grants (agent);

-- Limits that an operator set for one agent, in place of its manifest's.
create table budgets (
    agent    bigint not null references agents,
    name     text not null,
    kind     text not null check (kind in ('total', 'rate')),
    amount   double precision not null check (amount >= 0),
    period_s double precision check (period_s > 0),
    set_by   text not null,
    at       timestamptz not null default clock_timestamp(),
    primary key (agent, name, kind)
);

-- What an owner settled, cancelled or listed when it took notice of an epoch.
create table acks (
    agent  bigint not null references agents,
    epoch  bigint not null,
    report jsonb not null,
    at     timestamptz not null default clock_timestamp(),
    primary key (agent, epoch)
);

-- Intents, outcomes and events; append-only. A chain is an agent's key, or minus a kernel's key.
-- Columns of fixed width come first: no padding between them. The hash covers all other columns in this order.
create table journal (
    chain       bigint not null,
    pos         bigint not null,
    step        bigint not null,
    started_us  bigint not null,
    duration_us bigint not null,
    branch      integer not null,
    lane_step   integer not null,
    phase       smallint not null,
    lane        text not null,
    action      text not null,
    resource    text not null,
    effect      text not null,
    verdict     text not null,
    outcome     text not null,
    effect_id   text not null,
    digest      bytea not null,
    body        bytea not null,
    hash        bytea not null,
    -- The order of a chain. Also what makes a batch that is written twice by a lost connection fail the second time.
    primary key (chain, pos)
);
-- Replay, recovery and `steps` ask for one step or a range of steps of one agent.
create index journal_step on journal (chain, step);
-- Who read what is undone, and who did something since a time, is asked of all agents. Rows come in the order of their times, so this is small.
create index journal_times on journal using brin (started_us);

-- Accidents end here. Who may alter the table can still rewrite it; that shows in the chain and its anchors.
create function journal_append_only() returns trigger language plpgsql as $$
begin
    if tg_op = 'DELETE' and current_setting('ringfence.archiving', true) = 'on' then
        return null;
    end if;
    raise exception 'the journal is append-only';
end $$;
create trigger append_only before update or delete or truncate on journal
    for each statement execute function journal_append_only();

-- Signed heads, as they were also written to the anchor file outside the database.
create table anchors (
    kernel       bigint not null,
    pos          bigint not null,
    hash         bytea not null,
    heads_digest bytea not null,
    signature    bytea not null,
    at           timestamptz not null default clock_timestamp(),
    primary key (kernel, pos)
);

-- Saved states of agents. Steps are unique within an agent, over all its branches.
create table checkpoints (
    agent          bigint not null references agents,
    step           bigint not null,
    branch         integer not null,
    lane_step      integer not null,
    schema_version integer not null,
    next_child     integer not null,
    state          bytea not null,
    digest         bytea not null,
    at             timestamptz not null default clock_timestamp(),
    packing        smallint not null default 0, -- of `state`: 0 as it is, 1 a frame, 2 a frame that needs the state of `base`
    base           bigint,
    primary key (agent, step),
    foreign key (agent, base) references checkpoints
);

-- Shared state, current versions. Version 0 without a value only holds the place for a row lock: such a key never existed.
create table state (
    key     text collate "C" primary key,
    version bigint not null,
    value   bytea,
    agent   text not null default '',
    step    bigint not null default 0,
    at      timestamptz not null default clock_timestamp()
);

-- Every version ever. A deletion is a version without value.
create table state_history (
    key     text not null,
    version bigint not null,
    value   bytea,
    agent   text not null,
    step    bigint not null,
    at      timestamptz not null default clock_timestamp(),
    primary key (key, version)
);
-- Rollback asks what one agent wrote after a step.
create index state_history_agent on state_history (agent, step);

-- Locks the agents of a batch until the transaction ends, then says what is true of each: a fresh snapshot per statement,
-- taken after the locks.
create function journal_check(p_kernel bigint, p_fence bigint, p_keys bigint[])
returns table (key bigint, epoch bigint, owned boolean) language plpgsql as $$
declare
    k bigint;
begin
    foreach k in array p_keys loop
        perform pg_advisory_xact_lock_shared(k);
    end loop;
    return query
        select a.key, a.epoch, coalesce(a.owner = p_kernel, false) and exists (
            select from kernels n where n.key = p_kernel and n.fence = p_fence and n.lease_until > clock_timestamp())
        from agents a where a.key = any (p_keys);
end $$;

-- Checks a batch and inserts it if all of it may be written, in one round trip. A null epoch: no revocation concerns it.
-- Answers nothing when it inserted, else the truth about every agent of the batch.
create function journal_append(p_kernel bigint, p_fence bigint, p_keys bigint[], p_epochs bigint[], p_rows journal[])
returns table (key bigint, epoch bigint, owned boolean) language plpgsql as $$
declare
    k bigint;
    good integer;
begin
    foreach k in array p_keys loop
        perform pg_advisory_xact_lock_shared(k);
    end loop;
    if cardinality(p_keys) > 0 then
        select count(*) into good
        from unnest(p_keys, p_epochs) as w (key, epoch)
        join agents a on a.key = w.key and a.owner = p_kernel and a.epoch = coalesce(w.epoch, a.epoch)
        where exists (
            select from kernels n where n.key = p_kernel and n.fence = p_fence and n.lease_until > clock_timestamp());
        if good <> cardinality(p_keys) then
            return query select * from journal_check(p_kernel, p_fence, p_keys);
            return;
        end if;
    end if;
    insert into journal select * from unnest(p_rows);
end $$;

-- Takes over up to p_limit of the agents named by p_ids (null: all) that no living kernel owns: never owned, released, lease run out, or owned by a dead
-- predecessor of this kernel (same host, boot and data directory). The old owner is fenced first: its next heartbeat fails.
-- Whatever the old owner had under way is lost to it, so the current epoch counts as acknowledged.
create function claim_agents(p_kernel bigint, p_fence bigint, p_limit integer, p_ids text[])
returns setof agents language plpgsql as $$
declare
    me kernels;
    k bigint;
    claimed agents;
begin
    select * into me from kernels n
    where n.key = p_kernel and n.fence = p_fence and n.lease_until > clock_timestamp();
    if not found then
        return;
    end if;
    perform from kernels n
    where n.key <> me.key and n.fence > 0
        and (n.released_at is not null or n.lease_until <= clock_timestamp()
            or (n.host = me.host and n.boot_id = me.boot_id and n.data_dir = me.data_dir))
        and exists (select from agents a where a.owner = n.key and a.state not in ('done', 'failed', 'killed')
            and (p_ids is null or a.id = any (p_ids)))
    order by n.key for update;
    update kernels n set fence = -nextval('fences'), lease_until = least(n.lease_until, clock_timestamp())
    where n.key <> me.key and n.fence > 0
        and (n.released_at is not null or n.lease_until <= clock_timestamp()
            or (n.host = me.host and n.boot_id = me.boot_id and n.data_dir = me.data_dir))
        and exists (select from agents a where a.owner = n.key and a.state not in ('done', 'failed', 'killed')
            and (p_ids is null or a.id = any (p_ids)));
    for k in
        select a.key from agents a left join kernels n on n.key = a.owner
        where a.state not in ('done', 'failed', 'killed') and (a.owner is null or n.fence < 0)
            and (p_ids is null or a.id = any (p_ids))
        order by a.key limit p_limit
    loop
        perform pg_advisory_xact_lock(k);
        update agents a set owner = p_kernel, acked_epoch = a.epoch
        where a.key = k and a.state not in ('done', 'failed', 'killed')
            and (a.owner is null or exists (select from kernels n where n.key = a.owner and n.fence < 0))
        returning a.* into claimed;
        if found then
            insert into acks (agent, epoch, report) values (k, claimed.epoch, '{"owner_lost": true}')
            on conflict do nothing;
            return next claimed;
        end if;
    end loop;
end $$;

-- Moves an agent's policy epoch and tells its owner. The caller holds the agent's lock exclusively.
create function move_epoch(p_agent bigint) returns bigint language plpgsql as $$
declare
    moved bigint;
begin
    update agents set epoch = epoch + 1 where key = p_agent returning epoch into moved;
    perform pg_notify('ringfence_epoch', json_build_object('agent', p_agent, 'epoch', moved)::text);
    return moved;
end $$;

-- Parked calls that wait for a person. `arguments` and `edited` are canonical JSON; `asks` says which rules asked about what;
-- `versions` holds how the target stood when it was asked. Rows are marked, never removed. `votes` holds what each person
-- said, in order; one with `void` no longer counts, as it was for other arguments. `people` is how many have to approve,
-- `not_by` who can't.
create table approvals (
    key        bigint generated always as identity primary key,
    agent      bigint not null references agents,
    step       bigint not null,
    branch     integer not null,
    lane       text not null,
    lane_step  integer not null,
    action     text not null,
    resource   text not null,
    effect     text not null,
    arguments  text not null,
    digest     text not null,
    edited     text,
    asks       jsonb not null,
    versions   jsonb not null default '{}',
    detail     jsonb not null default '{}',
    state      text not null default 'pending' check (state in ('pending', 'approved', 'denied', 'expired', 'voided')),
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    decided_at timestamptz,
    decided_by text,
    reason     text not null default '',
    good_until timestamptz,
    people     integer not null default 1,
    not_by     text not null default '',
    votes      jsonb not null default '[]'
);
-- A step waits for one person at a time.
create unique index approvals_pending on approvals (agent, step) where state = 'pending';
-- Adoption and `show` ask for those of one agent.
create index approvals_agent on approvals (agent, step);
-- A call that asks looks whether it was approved for longer than once.
create index approvals_standing on approvals (agent, digest) where good_until is not null;

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
    voided_at     timestamptz,
    untrusted     boolean not null default false
);
-- What waits in a mailbox, oldest first.
create index messages_waiting on messages (recipient, key) where taken_step is null and voided_at is null;
-- Rollback asks what an agent sent, and what it took.
create index messages_sender on messages (sender_key, sender_step) where sender_key is not null;
create index messages_taken on messages (recipient, taken_step) where taken_step is not null;

-- What hooks were given, by the id that its sender gave it: for a month none of it is put into a mailbox twice.
create table deliveries (
    hook    text not null,
    id      text not null,
    digest  bytea not null,
    agent   bigint not null references agents on delete cascade,
    message bigint not null,
    at      timestamptz not null default clock_timestamp(),
    primary key (hook, id)
);
create index deliveries_at on deliveries (at);

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

-- Agents that an operator removed. Their rows in the journal stay: it is append-only.
create table removed (
    agent bigint primary key references agents,
    at    timestamptz not null default clock_timestamp(),
    by    text not null
);

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

-- Who was spawned by whom. An agent without a row here was submitted. Depth 1: the parent was submitted; `root` is that
-- agent. `step` and `branch` say where the parent spawned it. `reserved`: what its totals took from its parent's.
-- INVARIANT: a parent's row outlives its children's, for a child without its parent would have more rights than with it.
create table kin (
    child    bigint primary key references agents on delete cascade,
    parent   bigint not null references agents,
    root     bigint not null references agents,
    step     bigint not null,
    branch   integer not null,
    depth    integer not null,
    reserved jsonb not null
);
-- The children of one agent, in the order they were spawned; and all of a tree.
create index kin_parent on kin (parent, child);
create index kin_root on kin (root);

-- An agent and all that descend from it.
create function family(p_agent bigint) returns setof bigint language sql stable as $$
    with recursive f (key) as (
        select p_agent
        union
        select k.child from f join kin k on k.parent = f.key)
    select key from f
$$;

-- Locks an agent and all its descendants exclusively. A child that is spawned meanwhile is committed under its parent's lock,
-- so it is looked for again until there is no new one.
create function lock_family(p_agent bigint) returns bigint[] language plpgsql as $$
declare
    held bigint[] := '{}';
    found bigint[];
    k bigint;
begin
    loop
        select array_agg(f.key order by f.key) into found from family(p_agent) f (key) where f.key <> all (held);
        if found is null then
            return held;
        end if;
        foreach k in array found loop
            perform pg_advisory_xact_lock(k);
        end loop;
        held := held || found;
    end loop;
end $$;

-- Revokes grants (null: all) and moves the epoch of the agent and of all its descendants, whose rights it bounds. When it
-- commits, no batch decided under an old epoch can commit.
create function revoke_grants(p_agent bigint, p_grants bigint[])
returns setof grants language plpgsql as $$
declare
    held bigint[] := lock_family(p_agent);
    k bigint;
begin
    return query
        update grants g set revoked_at = clock_timestamp()
        where g.agent = p_agent and g.revoked_at is null and (p_grants is null or g.key = any (p_grants))
        returning g.*;
    foreach k in array held loop
        perform move_epoch(k);
    end loop;
end $$;

-- Adds a permission and moves the epoch, likewise.
create function add_grant(
    p_agent bigint, p_verdict text, p_rule text, p_by text, p_expires_at timestamptz, p_uses integer)
returns setof grants language plpgsql as $$
declare
    held bigint[] := lock_family(p_agent);
    k bigint;
begin
    return query
        insert into grants (agent, origin, verdict, rule, created_by, expires_at, uses_left)
        values (p_agent, 'operator', p_verdict, p_rule, p_by, p_expires_at, p_uses)
        returning *;
    foreach k in array held loop
        perform move_epoch(k);
    end loop;
end $$;

-- Budgets of many agents together. One row per total and window: what all shares have taken of it. `closes` null: never.
create table pools (
    pool   text not null,
    name   text not null,
    opens  timestamptz not null,
    closes timestamptz,
    taken  double precision not null default 0,
    primary key (pool, name, opens)
);

-- What one agent has taken of a pool: what it used, what its calls under way hold (`held` is both, when it was last said, and
-- `busy` the latter), and a remainder that its kernel gives out without asking. Only `kernel` may change it. Since
-- `since_us`, by the clock of the kernel that opened it, the journal knows what was used.
-- INVARIANT: pools.taken is the sum of its shares, so it never passes the limit that a share was taken under.
create table pool_shares (
    pool     text not null,
    name     text not null,
    opens    timestamptz not null,
    agent    bigint not null,
    kernel   bigint not null,
    amount   double precision not null default 0,
    held     double precision not null default 0,
    busy     double precision not null default 0,
    since_us bigint not null,
    primary key (pool, name, opens, agent)
);
-- Adoption asks for those of one agent.
create index pool_shares_agent on pool_shares (agent);

-- Limits that an operator set for a pool, in place of the kernel file's.
create table pool_limits (
    pool   text not null,
    name   text not null,
    amount double precision not null check (amount >= 0),
    set_by text not null,
    at     timestamptz not null default clock_timestamp(),
    primary key (pool, name)
);

-- What a call of a model `reserved` or `used`, from the head of its body, where only the marks of taint may come before.
-- Nothing else is read: what an agent wrote comes later and is never taken for it.
create function body_amounts(p_body bytea) returns jsonb language sql immutable as $$
    select substring(convert_from(substring(p_body for 16384), 'LATIN1') from
        '^\{(?:"facts":\{(?:[^{}"]|"(?:[^"\\]|\\.)*"|\{(?:[^{}"]|"(?:[^"\\]|\\.)*")*\})*\},)?"(?:reserved|used)":(\{[^}]*\})')::jsonb
$$;

-- Parts of chains that were moved to files of the archive, which hold all of their rows. Some rows stay in the journal as well:
-- `kept` says of each its position, the hash of the row before it, and its own. `behind` is the step of the checkpoint that a
-- part lies behind. A part without its file was given up at `pruned_at`.
create table segments (
    chain      bigint not null,
    first_pos  bigint not null,
    last_pos   bigint not null,
    first_step bigint not null,
    last_step  bigint not null,
    behind     bigint not null,
    rows       integer not null,
    since_us   bigint not null,
    until_us   bigint not null,
    size_bytes bigint not null,
    before     bytea not null,
    hash       bytea not null,
    sha256     bytea not null,
    kept       bytea not null,
    place      text not null,
    at         timestamptz not null default clock_timestamp(),
    pruned_at  timestamptz,
    primary key (chain, first_pos)
);

-- What was spent by steps that left the journal: by run (the last step before it) and by the hour in which they had ended.
create table carried (
    chain       bigint not null,
    run         bigint not null,
    ended_us    bigint not null,
    last_step   bigint not null,
    steps       bigint not null,
    calls       bigint not null,
    destructive bigint not null,
    external    bigint not null,
    denied      bigint not null,
    tokens      double precision not null,
    usd         double precision not null,
    bytes       double precision not null,
    primary key (chain, run, ended_us)
);

-- Moves rows out of the journal that a file holds: notes the part, carries what they spent, and removes them, all or nothing.
-- Answers how many were removed; null: this kernel may not write the chain, and nothing was done.
create function journal_archive(p_kernel bigint, p_fence bigint, p_part jsonb, p_gone bigint[]) returns integer
language plpgsql as $$
declare
    part segments := jsonb_populate_record(null::segments, p_part || jsonb_build_object('at', clock_timestamp()));
    gone integer;
begin
    perform pg_advisory_xact_lock_shared(part.chain);
    -- An agent's chain is its owner's. A kernel's own is also that of its successors on the same data directory.
    if not exists (select from agents a where a.key = part.chain and a.owner = p_kernel)
        and not exists (select from kernels me join kernels k on k.key <= me.key and k.host = me.host and k.data_dir = me.data_dir
            where me.key = p_kernel and k.key = -part.chain)
        or not exists (select from kernels n
            where n.key = p_kernel and n.fence = p_fence and n.lease_until > clock_timestamp()) then
        return null;
    end if;
    insert into segments select part.*;
    insert into carried as c (chain, run, ended_us, last_step, steps, calls, destructive, external, denied, tokens, usd, bytes)
    select part.chain, s.run, s.ended_us, max(s.step), count(*), count(*) filter (where s.spent),
        count(*) filter (where s.spent and s.destroy), count(*) filter (where s.spent and s.external),
        count(*) filter (where s.denied), coalesce(sum((s.amounts ->> 'tokens')::float8), 0),
        coalesce(sum((s.amounts ->> 'usd')::float8), 0), coalesce(sum((s.amounts ->> 'bytes')::float8), 0)
    from (
        select j.step, (select coalesce(max(b.cut_step), 0) from branches b
                where b.agent = part.chain and b.parent is null and b.cut_step < j.step) as run,
            -- The end of the hour: what ended in it counts as long as any of it may.
            (max(j.started_us + j.duration_us) / 3600000000 + 1) * 3600000000 as ended_us,
            bool_or(j.verdict in ('allow', 'ask') and j.outcome <> 'parked')
                and not bool_or(j.phase = 1 and j.outcome in ('denied', 'refused')) as spent,
            bool_or(j.effect = 'DESTROY') as destroy,
            bool_or(j.effect = 'EXTERNAL') as external,
            bool_or(j.verdict = 'deny' or j.outcome = 'denied') as denied,
            (array_agg(case when substring(j.body for 6) in ('{"used', '{"fact') then body_amounts(j.body) end order by j.pos desc)
                filter (where j.phase = 1 and j.outcome <> 'parked'))[1] as amounts
        from journal j
        where j.chain = part.chain and j.pos = any (p_gone) and j.phase in (0, 1) and j.step > 0
        group by j.step) s
    group by s.run, s.ended_us
    on conflict (chain, run, ended_us) do update set last_step = greatest(c.last_step, excluded.last_step),
        steps = c.steps + excluded.steps, calls = c.calls + excluded.calls, destructive = c.destructive + excluded.destructive,
        external = c.external + excluded.external, denied = c.denied + excluded.denied,
        tokens = c.tokens + excluded.tokens, usd = c.usd + excluded.usd, bytes = c.bytes + excluded.bytes;
    perform set_config('ringfence.archiving', 'on', true);
    delete from journal j where j.chain = part.chain and j.pos = any (p_gone);
    get diagnostics gone = row_count;
    perform set_config('ringfence.archiving', 'off', true);
    if gone <> cardinality(p_gone) then
        raise exception 'the rows to archive are not all there';
    end if;
    return gone;
end $$;

-- Whether no rollback of an agent comes back to before a step of its: it was archived, or the agent was removed.
create function message_settled(p_agent bigint, p_step bigint) returns boolean language sql stable as $$
    select exists (select from removed r where r.agent = p_agent)
        or p_step <= (select coalesce(max(s.behind), 0) from segments s where s.chain = p_agent)
$$;

-- What an agent used of a total, with what calls without an outcome hold: of calls that ended since a time, or did not end.
-- What left the journal counts by the hour. A call that began before and ended after counts whole: too much is kept rather than too little.
create function pool_recount(p_agent bigint, p_name text, p_since_us bigint) returns double precision
language sql stable as $$
    select case when p_name in ('calls', 'destructive') then (
        select count(*) filter (where s.spent and (p_name = 'calls' or s.destroy) and (s.open or s.ended_us >= p_since_us))
        from (
            select bool_or(verdict in ('allow', 'ask') and outcome <> 'parked')
                    and not bool_or(phase = 1 and outcome in ('denied', 'refused')) as spent,
                bool_or(effect = 'DESTROY') as destroy,
                not bool_or(phase = 1 and outcome <> 'parked') as open,
                max(started_us + duration_us) as ended_us
            from journal where chain = p_agent and phase in (0, 1) and step > 0 group by step) s)::float8
        + (select coalesce(sum(case p_name when 'calls' then c.calls else c.destructive end), 0)
            from carried c where c.chain = p_agent and c.ended_us >= p_since_us)::float8
    else (
        select coalesce(sum((a.amounts ->> p_name)::float8), 0)
        from (
            select distinct on (step) phase, started_us + duration_us as ended_us, body_amounts(body) as amounts
            from journal
            where chain = p_agent and phase in (0, 1) and (p_name = 'bytes' or starts_with(action, 'llm.'))
                and outcome <> 'parked'
            order by step, phase desc, pos desc) a
        where a.phase = 0 or a.ended_us >= p_since_us)
        + (select coalesce(sum(case p_name when 'tokens' then c.tokens when 'usd' then c.usd else c.bytes end), 0)
            from carried c where c.chain = p_agent and c.ended_us >= p_since_us)
    end
$$;

-- Makes a kernel the holder of an agent's share and answers its amount. One that is there is counted again from the journal:
-- what an earlier holder had not given out goes back. Answers null where somebody else owns the agent: only its owner may add
-- to what is counted. One that has ended anybody may count.
create function pool_open(
    p_kernel bigint, p_agent bigint, p_pool text, p_name text, p_opens timestamptz, p_closes timestamptz, p_now_us bigint)
returns double precision language plpgsql as $$
declare
    share pool_shares;
    counted double precision;
begin
    if not exists (select from agents a where a.key = p_agent
        and (a.owner = p_kernel or a.state in ('done', 'failed', 'killed'))) then
        return null;
    end if;
    insert into pools (pool, name, opens, closes) values (p_pool, p_name, p_opens, p_closes) on conflict do nothing;
    perform from pools p where p.pool = p_pool and p.name = p_name and p.opens = p_opens for update;
    select * into share from pool_shares s
    where s.pool = p_pool and s.name = p_name and s.opens = p_opens and s.agent = p_agent;
    if not found then
        insert into pool_shares (pool, name, opens, agent, kernel, since_us)
        values (p_pool, p_name, p_opens, p_agent, p_kernel, p_now_us);
        return 0;
    end if;
    counted := pool_recount(
        p_agent, p_name, greatest(share.since_us, (extract(epoch from p_opens) * 1000000)::bigint));
    update pool_shares s set kernel = p_kernel, amount = counted, held = counted, busy = 0
    where s.pool = p_pool and s.name = p_name and s.opens = p_opens and s.agent = p_agent;
    update pools p set taken = p.taken + counted - share.amount
    where p.pool = p_pool and p.name = p_name and p.opens = p_opens;
    return counted;
end $$;

-- Changes shares that a kernel holds: each to `keep`, and `ask` more, and perhaps up to `more` on top, as far as `limit` goes.
-- Where `ask` does not fit nothing is added. Answers, by the place of the move, what the share has now (null: another
-- kernel's) and what is taken of the pool.
create function pool_move(p_kernel bigint, p_moves jsonb)
returns table (nr integer, amount double precision, taken double precision)
language plpgsql as $$
declare
    m record;
    mine double precision;
    room double precision;
begin
    for m in
        select (t.item ->> 'pool') as pool, (t.item ->> 'name') as name, (t.item ->> 'opens')::timestamptz as opens,
            (t.item ->> 'agent')::bigint as agent, (t.item ->> 'keep')::float8 as keep, (t.item ->> 'held')::float8 as held,
            (t.item ->> 'busy')::float8 as busy, (t.item ->> 'ask')::float8 as ask, (t.item ->> 'more')::float8 as more,
            (t.item ->> 'limit')::float8 as cap, t.place::integer - 1 as place
        from jsonb_array_elements(p_moves) with ordinality t (item, place)
        order by 1, 2, 3, 4
    loop
        nr := m.place;
        select p.taken into taken from pools p where p.pool = m.pool and p.name = m.name and p.opens = m.opens for update;
        select s.amount into mine from pool_shares s
        where s.pool = m.pool and s.name = m.name and s.opens = m.opens and s.agent = m.agent and s.kernel = p_kernel;
        amount := null;
        if mine is not null then
            room := m.cap - (taken - mine) - m.keep;
            amount := m.keep;
            if m.ask <= room + 1e-9 then
                amount := m.keep + m.ask;
                room := greatest(0, least(m.more, (room - m.ask) / 16));
                amount := amount + case when m.name = 'usd' then room else floor(room) end;
            end if;
            update pool_shares s set amount = pool_move.amount, held = m.held, busy = m.busy
            where s.pool = m.pool and s.name = m.name and s.opens = m.opens and s.agent = m.agent;
            taken := taken + amount - mine;
            update pools p set taken = pool_move.taken
            where p.pool = m.pool and p.name = m.name and p.opens = m.opens;
        end if;
        return next;
    end loop;
end $$;

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
        'undo', left(new.detail ->> 'undo', 512), 'edited', new.edited is not null,
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

-- Work claims: who works at a key, until when. `fence` counts the takes and never goes back: what names an older one is refused.
-- A row that nobody ever took only holds the place for a lock.
create table claims (
    key   text collate "C" primary key,
    fence bigint not null default 0,
    agent bigint references agents,
    lane  text not null default '',
    step  bigint not null default 0,
    until timestamptz
);
-- A rollback and `layers` ask for those of one agent.
create index claims_agent on claims (agent) where agent is not null;

-- Tools of MCP servers as their definitions were taken, and the other one that a server offers by now.
create table mcp_tools (
    server text not null,
    tool text not null,
    taken text not null,
    taken_hash text not null,
    taken_at timestamptz not null default clock_timestamp(),
    taken_by text not null,
    offered text not null default '',
    offered_hash text not null default '',
    offered_at timestamptz,
    primary key (server, tool));

-- The rate of an upstream, over all kernels: what nobody has of it, which fills up like what somebody has. `spare`: calls that
-- could be made of it at `at`.
create table rate_lines (
    name  text primary key,
    spare double precision not null,
    at    timestamptz not null default clock_timestamp()
);

-- The part of the rate that one kernel goes by: so much of its count and of its refilling. Since `since` it wants one.
-- INVARIANT: the parts of a rate are at most 1 together, and a kernel has a call's worth or nothing.
create table rate_shares (
    name   text not null,
    kernel bigint not null,
    part   double precision not null default 0,
    since  timestamptz not null default clock_timestamp(),
    primary key (name, kernel)
);

-- Gives a kernel its part of a rate anew, an equal one for each that wants any. It has stopped to go by the one that it had, of
-- which `p_tokens` calls are left. A part grows only by what nobody has: `short` says that others have to give some up first, and
-- `gave` that this one did. Where there are more kernels than the rate has calls they take turns, one that `p_used` its part goes
-- last. What a dead kernel had left is nobody's: it may have used it.
create function rate_share(
    p_kernel bigint, p_name text, p_count double precision, p_span_s double precision, p_tokens double precision,
    p_want boolean, p_used boolean)
returns table (part double precision, tokens double precision, short boolean, gave boolean, crowded boolean)
language plpgsql as $$
declare
    line rate_lines;
    mine double precision;
    free double precision;
    others double precision;
    wanting integer;
    target double precision;
begin
    insert into rate_lines (name, spare) values (p_name, p_count) on conflict do nothing;
    select * into line from rate_lines l where l.name = p_name for update;
    select greatest(0, 1 - coalesce(sum(s.part), 0)), coalesce(sum(s.part) filter (where s.kernel = p_kernel), 0)
    into free, mine from rate_shares s where s.name = p_name;
    line.spare := least(free * p_count, line.spare
        + greatest(0, extract(epoch from clock_timestamp() - line.at)::float8) * free * p_count / p_span_s);
    delete from rate_shares s where s.name = p_name and s.kernel <> p_kernel and not exists (
        select from kernels n where n.key = s.kernel and n.released_at is null and n.lease_until > clock_timestamp());
    if p_want then
        insert into rate_shares (name, kernel) values (p_name, p_kernel) on conflict do nothing;
    else
        delete from rate_shares s where s.name = p_name and s.kernel = p_kernel;
    end if;
    select count(*), coalesce(sum(s.part) filter (where s.kernel <> p_kernel), 0)
    into wanting, others from rate_shares s where s.name = p_name;
    crowded := wanting > p_count;
    if crowded and p_used then
        update rate_shares s set since = clock_timestamp() where s.name = p_name and s.kernel = p_kernel;
    end if;
    target := case
        when not p_want then 0
        when not crowded then 1.0 / wanting
        when (select count(*) from rate_shares s join rate_shares m on m.name = s.name and m.kernel = p_kernel
            where s.name = p_name and (s.since, s.kernel) < (m.since, m.kernel)) < floor(p_count) then 1.0 / floor(p_count)
        else 0 end;
    part := least(target, greatest(0, 1 - others));
    if part * p_count < 1 - 1e-9 then
        part := 0;
    end if;
    short := part < target - 1e-9;
    gave := part < mine - 1e-9;
    tokens := greatest(0, least(p_tokens, mine * p_count));
    if part > mine then
        -- What became free since is nobody's yet, so it has no calls.
        free := greatest(0, 1 - others - mine);
        tokens := tokens + line.spare * (part - mine) / greatest(free, part - mine);
        line.spare := line.spare * greatest(0, free - (part - mine)) / greatest(free, part - mine);
    elsif tokens > part * p_count then
        line.spare := line.spare + tokens - part * p_count;
        tokens := part * p_count;
    end if;
    update rate_shares s set part = rate_share.part where s.name = p_name and s.kernel = p_kernel;
    update rate_lines l set spare = line.spare, at = clock_timestamp() where l.name = p_name;
    return next;
end $$;

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

-- Where clients are told of their tasks. `seen` is the last entry that was taken there, so what is not delivered stays to be.
-- `next_at` is also the lease of whoever sends.
create table task_pushes (
    task          text not null references tasks on delete cascade,
    id            text not null,
    url           text not null,
    token         text not null,
    scheme        text not null,
    credentials   text not null,
    seen          integer not null,
    over          boolean not null default false,
    attempts      integer not null default 0,
    failing_since timestamptz,
    last_error    text not null default '',
    next_at       timestamptz not null default clock_timestamp(),
    primary key (task, id)
);
create index task_pushes_due on task_pushes (next_at) where not over;

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

-- Agents that a kernel rolls back together with others: it wants them from the living kernel that owns them. That one answers
-- by making it the owner, or by saying why not. What a dead kernel asked for stands for nothing.
create table handovers (
    agent    bigint primary key references agents on delete cascade,
    asker    bigint not null,
    asked_at timestamptz not null default clock_timestamp(),
    lived    boolean not null default false, -- whether its program was ended for it
    refused  text not null default ''
);
