-- name: get
select key, version, value, agent, step from state where key = %(key)s and version > 0

-- name: read
-- And whether what wrote it was tainted then, which stands first in its row. A rollback writes what stood before, so whoever
-- ever wrote the same counts.
select s.key, s.version, s.value, s.agent, s.step, exists (
    select from agents a join journal j on j.chain = a.key and j.step = s.step and j.phase in (0, 1)
    where a.id = s.agent and (
        substring(j.body from 1 for 14) = '{"facts":{"tai'::bytea
        or (j.action = 'rollback' and exists (
            select from state_history h join agents b on b.id = h.agent
                join journal w on w.chain = b.key and w.step = h.step and w.phase = 1
            where h.key = s.key and h.value = s.value and substring(w.body from 1 for 14) = '{"facts":{"tai'::bytea)))) as tainted
from state s where s.key = %(key)s and s.version > 0

-- name: versions_after
select key, version, value, agent, step from state_history
where agent = %(agent)s and step > %(step)s order by key, version

-- name: version
select key, version, value, agent, step from state_history where key = %(key)s and version = %(version)s

-- name: hold
-- Rows to lock for keys that don't exist yet. Keys come sorted, so that two transactions never wait for each other.
insert into state (key, version) select k, 0 from unnest(%(keys)s::text[]) with ordinality as h (k, nr) order by h.nr
on conflict do nothing

-- name: lock
select key, version, value is not null as live, agent, step from state where key = any (%(keys)s::text[])
order by key collate "C" for update

-- name: record
insert into state_history (key, version, value, agent, step)
select * from unnest(%(keys)s::text[], %(versions)s::bigint[], %(values)s::bytea[], %(agents)s::text[], %(steps)s::bigint[])

-- name: advance
update state set version = n.version, value = n.value, agent = n.agent, step = n.step, at = clock_timestamp()
from unnest(%(keys)s::text[], %(versions)s::bigint[], %(values)s::bytea[], %(agents)s::text[], %(steps)s::bigint[])
    as n (key, version, value, agent, step)
where state.key = n.key
