-- name: new_key
select nextval(pg_get_serial_sequence('agents', 'key')) as key, (select id from kernels where key = %(kernel)s) as maker

-- name: fence_maker
-- Who made the files of a child, where it is dead: the rule by which agents are taken over.
update kernels n set fence = -nextval('fences'), lease_until = least(n.lease_until, clock_timestamp())
from kernels me
where me.key = %(kernel)s and me.fence = %(fence)s and me.lease_until > clock_timestamp()
    and n.id = %(maker)s and n.key <> me.key and n.fence > 0
    and (n.released_at is not null or n.lease_until <= clock_timestamp()
        or (n.key < me.key and n.host = me.host and n.boot_id = me.boot_id and n.data_dir = me.data_dir))

-- name: is_fenced
select 1 from kernels n join kernels me on me.key = %(kernel)s and me.fence = %(fence)s and me.lease_until > clock_timestamp()
where n.id = %(maker)s and n.fence < 0

-- name: lock_parent
select pg_advisory_xact_lock(%(parent)s)

-- name: is_born
select 1 from agents where id = %(child)s

-- name: parents
-- asked by 64: agent bigint
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
-- asked by 64: agent bigint, after bigint
select r.key, sum((r.value)::double precision) from kin k, jsonb_each_text(k.reserved) r
where k.parent = %(agent)s and k.step > %(after)s group by r.key
