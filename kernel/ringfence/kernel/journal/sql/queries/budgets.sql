-- name: list
-- asked by 64: agent bigint
select name, kind, amount, period_s, set_by, at from budgets where agent = %(agent)s order by kind, name

-- name: set
insert into budgets (agent, name, kind, amount, period_s, set_by)
values (%(agent)s, %(name)s, %(kind)s, %(amount)s, %(period_s)s, %(by)s)
on conflict (agent, name, kind) do update
    set amount = excluded.amount, period_s = excluded.period_s, set_by = excluded.set_by, at = clock_timestamp()

-- name: unset
delete from budgets where agent = %(agent)s and name = %(name)s and kind = %(kind)s

-- name: turns
-- How many calls of each action ended within spans of time before now: an agent's own, and those of its family. What has no
-- outcome yet counts from its intent. A call of a server's tool counts as that tool.
select p.span_us, case j.action when 'mcp.call' then 'mcp.' || j.resource else j.action end as action,
    count(distinct j.step) filter (where j.chain = %(agent)s) as own,
    count(distinct (j.chain, j.step)) as family
from unnest(%(spans_us)s::bigint[]) as p (span_us)
join journal j on j.started_us + j.duration_us > %(now_us)s - p.span_us
where j.chain = any (%(chains)s::bigint[]) and j.phase in (0, 1) and j.step > 0 and j.verdict <> 'deny'
    and j.outcome not in ('denied', 'refused', 'parked')
group by 1, 2
