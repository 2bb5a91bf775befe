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
    m.created_at, a.id,
    exists (select from journal j where j.chain = m.agent and j.step = m.step and j.phase = 1
        and substring(j.body from 1 for 14) = '{"facts":{"tai'::bytea)
from memories m join agents a on a.key = m.agent
where not m.hidden and m.space = %(space)s and (%(space)s <> '' or m.agent = %(agent)s) and m.tags @> %(tags)s::text[]
    and (%(query)s = '' or m.words @@ websearch_to_tsquery(%(language)s::regconfig, %(query)s))
order by 5 desc, m.key desc limit %(limit)s offset %(offset)s

-- name: artifact
select name, version, ref, media_type, size_bytes,
    exists (select from journal j where j.chain = agent and j.step = artifacts.step and j.phase = 1
        and substring(j.body from 1 for 14) = '{"facts":{"tai'::bytea)
from artifacts
where agent = %(agent)s and not hidden
    and case when %(ref)s = '' then name = %(name)s and (%(version)s = 0 or version = %(version)s) else ref = %(ref)s end
order by version desc, created_at desc limit 1

-- name: artifact_keep
-- Output of a command. A call that is run again after a crash has the same names: what it left counts.
insert into artifacts (agent, name, version, ref, media_type, size_bytes, step, branch)
values (%(agent)s, %(name)s,
    1 + coalesce((select max(version) from artifacts where agent = %(agent)s and name = %(name)s), 0),
    %(ref)s, %(media_type)s, %(size_bytes)s, %(step)s, %(branch)s)

-- name: lock_sent
-- What nobody has taken yet is not taken while it is decided what becomes of it.
select key from messages where sender_key = %(agent)s and taken_step is null order by key for update

-- name: rewind
select 'message' as kind, 'm' || r.item as target,
    case r.kind when 'returned' then 'return' when 'taken again' then 'take' when 'voided' then 'void'
        when 'sent again' then 'send' else 'taken' end as action,
    case when r.kind in ('returned', 'taken again') then 'from ' else 'to ' end || r.who as detail,
    coalesce(m.sender_step, 0) as step
from atoms_rewind(%(agent)s, %(branches)s::integer[], %(cuts)s::bigint[], %(dry)s) r join messages m on m.key = r.item
order by r.item

-- name: rewind_kept
-- What a rewind hides or brings back; asked before it.
select 'memory' as kind, 'e' || m.key as target, case when m.hidden then 'restore' else 'hide' end as action,
    case when m.space = '' then 'own' else m.space end as detail, 0::bigint as step
from memories m
where m.agent = %(agent)s and m.hidden = exists (
    select from unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to)
    where m.branch = l.branch and m.step <= l.up_to)
union all
select 'artifact', f.name || ' version ' || f.version, case when f.hidden then 'restore' else 'hide' end, f.ref, 0::bigint
from artifacts f
where f.agent = %(agent)s and f.hidden = exists (
    select from unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to)
    where f.branch = l.branch and f.step <= l.up_to)
union all
select 'claim', c.key, 'release', '', c.step
from claims c
where c.agent = %(agent)s and c.step > %(cut)s

-- name: release_claims
-- Those taken after the cut. The fence stays, so that what was done under them is fenced off.
update claims set agent = null, until = null where agent = %(agent)s and step > %(cut)s
