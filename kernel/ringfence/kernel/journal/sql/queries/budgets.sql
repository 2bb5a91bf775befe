-- name: list
select name, kind, amount, period_s, set_by, at from budgets where agent = %(agent)s order by kind, name

-- name: set
insert into budgets (agent, name, kind, amount, period_s, set_by)
values (%(agent)s, %(name)s, %(kind)s, %(amount)s, %(period_s)s, %(by)s)
on conflict (agent, name, kind) do update
    set amount = excluded.amount, period_s = excluded.period_s, set_by = excluded.set_by, at = clock_timestamp()

-- name: unset
delete from budgets where agent = %(agent)s and name = %(name)s and kind = %(kind)s
