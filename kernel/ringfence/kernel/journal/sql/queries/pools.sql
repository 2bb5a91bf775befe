-- name: open
select pool_open(%(kernel)s, %(agent)s, %(pool)s, %(name)s, %(opens)s, %(closes)s, %(now_us)s)

-- name: move
select nr, amount, taken from pool_move(%(kernel)s, %(moves)s::jsonb)

-- name: of_agent
-- asked by 64: agent bigint
-- What an agent's earlier holder has left in windows that are open.
select s.pool, s.name, s.opens, p.closes
from pool_shares s join pools p using (pool, name, opens)
where s.agent = %(agent)s and s.kernel <> %(kernel)s and (p.closes is null or p.closes > clock_timestamp())

-- name: holders
-- Living kernels that hold shares of a window with something to give back or to settle, besides one.
select distinct s.kernel
from pool_shares s join kernels n on n.key = s.kernel
where s.pool = %(pool)s and s.name = %(name)s and s.opens = %(opens)s and s.kernel <> %(kernel)s and s.amount > 0
    and n.released_at is null and n.lease_until > clock_timestamp()

-- name: left_behind
-- Shares of a window whose kernel is gone and whose agent has ended, so that nobody takes it over: they are counted here.
select s.agent
from pool_shares s join kernels n on n.key = s.kernel join agents a on a.key = s.agent
where s.pool = %(pool)s and s.name = %(name)s and s.opens = %(opens)s and s.amount > s.held
    and a.state in ('done', 'failed', 'killed') and (n.released_at is not null or n.fence < 0 or n.lease_until < clock_timestamp() - make_interval(secs => 60))

-- name: state
select p.taken, coalesce(sum(s.busy), 0) as busy, coalesce(sum(greatest(s.amount - s.held, 0)), 0) as idle,
    count(s.agent) as agents
from pools p left join pool_shares s using (pool, name, opens)
where p.pool = %(pool)s and p.name = %(name)s and p.opens = %(opens)s
group by p.taken

-- name: limits
select pool, name, amount, set_by, at from pool_limits order by pool, name

-- name: set
insert into pool_limits (pool, name, amount, set_by) values (%(pool)s, %(name)s, %(amount)s, %(by)s)
on conflict (pool, name) do update
    set amount = excluded.amount, set_by = excluded.set_by, at = clock_timestamp()

-- name: unset
delete from pool_limits where pool = %(pool)s and name = %(name)s

-- name: forget
with gone as (
    delete from pools where closes < clock_timestamp() - make_interval(days => 35) returning pool, name, opens)
delete from pool_shares s using gone g where s.pool = g.pool and s.name = g.name and s.opens = g.opens
