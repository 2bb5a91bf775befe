-- name: each
-- A statement that says `asked by N`, for each of up to N agents: the columns that it names take the place of its values.
select asked.nr_, found.*
from jsonb_to_recordset(%(asked)s::jsonb) as asked (nr_ integer, /*columns*/)
cross join lateral (
/*statement*/
) as found
