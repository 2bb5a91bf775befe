-- name: effects
-- asked by 8: chain bigint, pos bigint
-- Outcomes of calls that left the system, over all branches, in the order they were recorded.
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and phase = 1 and effect_id <> '' and pos > %(pos)s
order by pos limit %(limit)s

-- name: facts
-- asked by 8: chain bigint, pos bigint
-- Outcomes that say something about facts: it stands first in them.
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and phase = 1 and pos > %(pos)s and substring(body from 1 for 9) = '{"facts":'::bytea
order by pos limit %(limit)s

-- name: born
-- asked by 16: agent bigint
select j.body from kin k join journal j on j.chain = k.parent and j.step = k.step and j.phase = 1
where k.child = %(agent)s order by j.pos desc limit 1

-- name: purged
-- asked by 16: chain bigint
select body from journal where chain = %(chain)s and phase = 3 and action = 'revoke.purge' order by pos

-- name: steps_page
-- Whole steps: a page never has an intent whose outcome is on the next one.
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and phase in (0, 1) and step in (
    select distinct step from journal where chain = %(chain)s and step > %(after)s and phase in (0, 1)
    order by step limit %(limit)s)
order by step, pos

-- name: answered
-- Newest first, and not further back than replies can be under way: an agent may ask for any place as often as it likes.
select chain, pos, phase, step, branch, lane, lane_step, action, resource, effect, verdict, outcome, digest, effect_id,
    started_us, duration_us, body, hash
from journal
where chain = %(chain)s and phase = 1 and lane = %(lane)s and lane_step = %(lane_step)s
    and outcome <> 'parked' and pos > (select max(pos) - %(reach)s from journal where chain = %(chain)s)
order by step desc, pos desc limit 1

-- name: take
-- An agent that ended is nobody's to run; whoever is asked about it may hold its chain unless its owner still lives.
update agents set owner = %(kernel)s
where key = %(agent)s and (owner is null or owner = %(kernel)s or not exists (
    select from kernels k where k.key = agents.owner and k.released_at is null and k.fence > 0
        and k.lease_until > clock_timestamp()
        and (k.host, k.boot_id, k.data_dir) is distinct from (
            select (n.host, n.boot_id, n.data_dir) from kernels n where n.key = %(kernel)s)))
returning key

-- name: state_before
select key, version, value, agent, step from state_history
where key = %(key)s and version < %(version)s order by version desc limit 1
