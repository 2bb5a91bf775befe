-- name: waiting
-- What waits in some mailboxes: enough to notice that something came.
select recipient, max(key), count(*) from messages
where recipient = any (%(keys)s) and taken_step is null and voided_at is null group by recipient

-- name: agent_name
select name from agents where id = %(id)s

-- name: owner
select owner from agents where key = %(key)s

-- name: search
-- Without words the newest. A space of its own is the agent's alone; a named one is shared.
select m.key, m.text, m.tags, m.metadata,
    case when %(query)s = '' then 0 else ts_rank(m.words, websearch_to_tsquery(%(language)s::regconfig, %(query)s)) end::float8,
    m.created_at, a.id
from memories m join agents a on a.key = m.agent
where not m.hidden and m.space = %(space)s and (%(space)s <> '' or m.agent = %(agent)s) and m.tags @> %(tags)s::text[]
    and (%(query)s = '' or m.words @@ websearch_to_tsquery(%(language)s::regconfig, %(query)s))
order by 5 desc, m.key desc limit %(limit)s offset %(offset)s

-- name: artifact
select name, version, ref, media_type, size_bytes from artifacts
where agent = %(agent)s and not hidden
    and case when %(ref)s = '' then name = %(name)s and (%(version)s = 0 or version = %(version)s) else ref = %(ref)s end
order by version desc, created_at desc limit 1

-- name: artifact_keep
-- Output of a command. A call that is run again after a crash has the same names: what it left counts.
insert into artifacts (agent, name, version, ref, media_type, size_bytes, step, branch)
values (%(agent)s, %(name)s,
    1 + coalesce((select max(version) from artifacts where agent = %(agent)s and name = %(name)s), 0),
    %(ref)s, %(media_type)s, %(size_bytes)s, %(step)s, %(branch)s)

-- name: rewind
select kind, item, who, name from atoms_rewind(%(agent)s, %(branches)s::integer[], %(cuts)s::bigint[], %(dry)s) order by item
