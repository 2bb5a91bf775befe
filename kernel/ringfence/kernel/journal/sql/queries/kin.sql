-- name: new_key
select nextval(pg_get_serial_sequence('agents', 'key')) as key

-- name: parents
-- The parent of an agent, then the parent's, up to the one that was submitted.
with recursive up (key, parent, nr) as (
    select child, parent, 1 from kin where child = %(agent)s
    union all
    select k.child, k.parent, up.nr + 1 from up join kin k on k.child = up.parent)
select up.parent from up order by up.nr

-- name: descendants
-- All of them, parents before their children.
with recursive down (child, parent, step, depth) as (
    select child, parent, step, depth from kin where parent = %(agent)s
    union all
    select k.child, k.parent, k.step, k.depth from down join kin k on k.parent = down.child)
select child, parent, step, depth from down order by depth, child

-- name: all
select child, parent, step, depth from kin order by depth, child

-- name: reserved
select r.key, sum((r.value)::double precision) from kin k, jsonb_each_text(k.reserved) r
where k.parent = %(agent)s and k.step > %(after)s group by r.key
