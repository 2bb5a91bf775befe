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
create or replace function revoke_grants(p_agent bigint, p_grants bigint[])
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
create or replace function add_grant(
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
