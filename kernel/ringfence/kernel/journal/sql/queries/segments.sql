-- name: of_chain
-- asked by 64: chain bigint, after bigint
-- Parts of one chain in their order.
select chain, first_pos, last_pos, first_step, last_step, behind, rows, since_us, until_us, size_bytes, before, hash, sha256, kept,
    place, at, pruned_at
from segments where chain = %(chain)s and last_step >= %(after)s order by first_pos

-- name: totals
-- What lies in archives, and what was given up of it.
select count(*) filter (where pruned_at is null) as files, coalesce(sum(rows) filter (where pruned_at is null), 0)::bigint as rows,
    coalesce(sum(size_bytes) filter (where pruned_at is null), 0)::bigint as size_bytes,
    coalesce(sum(rows) filter (where pruned_at is not null), 0)::bigint as pruned
from segments where chain = %(chain)s

-- name: behind
select coalesce(max(behind), 0), coalesce(max(last_pos), 0),
    coalesce(max(last_step) filter (where pruned_at is not null), 0)
from segments where chain = %(chain)s

-- name: archive
select journal_archive(%(kernel)s, %(fence)s, %(part)s::jsonb, %(gone)s::bigint[])

-- name: prune
-- Gives a part up. The chain has recorded it before.
update segments s set pruned_at = clock_timestamp()
where s.chain = %(chain)s and s.first_pos = %(first_pos)s and s.pruned_at is null
    and exists (select from agents a join kernels n on n.key = a.owner
        where a.key = s.chain and n.key = %(kernel)s and n.fence = %(fence)s and n.lease_until > clock_timestamp())
returning s.first_pos

-- name: age
select extract(epoch from clock_timestamp() - at)::float8 from segments where chain = %(chain)s and first_pos = %(first_pos)s

-- name: needed
-- Steps with rows outside of a part, and those that a person was asked about.
select j.step from journal j
where j.chain = %(chain)s and j.step = any (%(steps)s::bigint[]) and not (j.pos between %(first)s and %(last)s)
union
select a.step from approvals a where a.agent = %(chain)s and a.step = any (%(steps)s::bigint[])

-- name: branches_after
-- Branches that have steps after one.
select distinct branch from journal where chain = %(chain)s and step > %(step)s and branch >= 0

-- name: checkpoint_before
-- The newest checkpoint of a lineage up to a step that is older than some seconds.
select coalesce(max(c.step), 0)
from checkpoints c
join unnest(%(branches)s::integer[], %(cuts)s::bigint[]) as l (branch, up_to) on c.branch = l.branch and c.step <= l.up_to
where c.agent = %(chain)s and c.step <= %(step)s and c.at <= clock_timestamp() - %(age_s)s * interval '1 second'

-- name: old_checkpoints
-- Before a step, without those that a later one rests on.
with recursive needed (step, base) as (
    select c.step, c.base from checkpoints c where c.agent = %(chain)s and c.step >= %(step)s
    union
    select c.step, c.base from needed n join checkpoints c on c.agent = %(chain)s and c.step = n.base)
select count(*) from checkpoints c
where c.agent = %(chain)s and c.step < %(step)s and c.step not in (select n.step from needed n)

-- name: prune_checkpoints
with recursive needed (step, base) as (
    select c.step, c.base from checkpoints c where c.agent = %(chain)s and c.step >= %(step)s
    union
    select c.step, c.base from needed n join checkpoints c on c.agent = %(chain)s and c.step = n.base),
gone as (
    delete from checkpoints c
    where c.agent = %(chain)s and c.step < %(step)s and c.step not in (select n.step from needed n)
        and exists (select from agents a join kernels k on k.key = a.owner
            where a.key = c.agent and k.key = %(kernel)s and k.fence = %(fence)s and k.lease_until > clock_timestamp())
    returning c.step)
select count(*) from gone

-- name: kernel_chains
-- Kernels of this one's data directory, itself too, and up to where their chains are so old: when a row was written its anchor
-- tells. The last row stays: who writes or signs on asks for it.
select k.id, k.key, least(max(a.pos), h.pos - 1)
from kernels me
join kernels k on k.key <= me.key and k.host = me.host and k.data_dir = me.data_dir
join anchors a on a.kernel = k.key and a.at <= clock_timestamp() - %(age_s)s * interval '1 second'
cross join lateral (select max(j.pos) as pos from journal j where j.chain = -k.key) h
cross join lateral (select max(p.last_pos) as last_pos from segments p where p.chain = -k.key) s
where me.key = %(kernel)s
group by k.id, k.key, s.last_pos, h.pos
having least(max(a.pos), h.pos - 1) - coalesce(s.last_pos, 0) >= case when k.key = %(kernel)s then %(many)s else %(least)s end
order by k.key

-- name: saved_at
-- Where the row stands that saved a checkpoint.
select coalesce(max(pos), 0) from journal where chain = %(chain)s and step = %(step)s and phase = 1

-- name: head
select coalesce(max(pos), 0) from journal where chain = %(chain)s

-- name: removed_before
-- Agents that were removed so long ago and have rows that may be archived.
select a.key, a.id, extract(epoch from clock_timestamp() - r.at)::float8
from removed r join agents a on a.key = r.agent
where r.at <= clock_timestamp() - %(age_s)s * interval '1 second'
order by a.key

-- name: ended_before
select a.id from agents a
where a.state in ('done', 'failed', 'killed') and a.ended_at <= clock_timestamp() - %(age_s)s * interval '1 second'
    and not exists (select from removed r where r.agent = a.key)
order by a.ended_at limit %(limit)s

-- name: prune_messages
-- Messages that were taken, or voided, so long ago that no rollback comes back to it: both sides ended, or archived it.
with gone as (
    select m.key from messages m
    where coalesce(m.taken_at, m.voided_at) <= clock_timestamp() - %(age_s)s * interval '1 second'
        and (m.taken_step is null or message_settled(m.recipient, m.taken_step))
        and (m.sender_key is null or message_settled(m.sender_key, m.sender_step))
    order by m.key limit %(limit)s
), deleted as (
    delete from messages m using gone where m.key = gone.key and not %(dry)s)
select count(*) from gone
