-- Each is this kernel's from now on, unless another living one has it.
-- name: reserve
insert into handovers (agent, asker)
select k, %(kernel)s from unnest(%(agents)s::bigint[]) k order by k
on conflict (agent) do update set asker = excluded.asker, asked_at = clock_timestamp(), lived = false, refused = ''
where handovers.asker = excluded.asker or not exists (
    select from kernels n where n.key = handovers.asker and n.fence > 0 and n.released_at is null and n.lease_until > clock_timestamp())
returning agent

-- name: held_by
select h.agent, n.id from handovers h join kernels n on n.key = h.asker
where h.agent = any (%(agents)s::bigint[]) and h.asker <> %(kernel)s

-- name: drop
delete from handovers where asker = %(kernel)s and agent = any (%(agents)s::bigint[])

-- What living kernels want of this one.
-- name: asked
select h.agent, h.asker from handovers h
join agents a on a.key = h.agent
join kernels n on n.key = h.asker
where a.owner = %(kernel)s and h.asker <> %(kernel)s and h.refused = ''
    and n.fence > 0 and n.released_at is null and n.lease_until > clock_timestamp()
order by h.agent

-- name: answer
select lived, refused from handovers where agent = %(agent)s and asker = %(kernel)s

-- The owner has ended all that it had under way, so the current epoch counts as acknowledged, as with whoever is taken over from.
-- name: give
with given as (
    update agents a set owner = h.asker, acked_epoch = a.epoch
    from handovers h
    join kernels n on n.key = h.asker
    where a.key = %(agent)s and h.agent = a.key and a.owner = %(kernel)s and h.asker = %(asker)s
        and n.fence > 0 and n.released_at is null and n.lease_until > clock_timestamp()
    returning a.key, a.epoch),
told as (
    insert into acks (agent, epoch, report) select key, epoch, '{"owner_lost": true}' from given on conflict do nothing)
update handovers h set lived = %(lived)s from given where h.agent = given.key
returning h.agent

-- name: refuse
update handovers set refused = %(why)s where agent = %(agent)s and asker = %(asker)s

-- Its last owner's kernel claims one that lives; one that ended is only to be found there.
-- name: give_back
update agents set owner = case when state in ('done', 'failed', 'killed') then %(owner)s::bigint end
where key = %(agent)s and owner = %(kernel)s

-- name: agents
select agent from handovers
