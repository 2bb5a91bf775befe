-- name: tools
select server, tool, taken, taken_hash, taken_at, taken_by, offered, offered_hash, offered_at
from mcp_tools where %(server)s = '' or server = %(server)s order by server, tool

-- name: see
-- Take what was never seen, and note what a server says now where that is another than what was taken.
insert into mcp_tools as t (server, tool, taken, taken_hash, taken_by, offered, offered_hash, offered_at)
select %(server)s, g ->> 'tool', g ->> 'taken', g ->> 'taken_hash', g ->> 'by', g ->> 'offered', g ->> 'offered_hash',
    case g ->> 'offered_hash' when '' then null else clock_timestamp() end
from jsonb_array_elements(%(tools)s::jsonb) g
on conflict (server, tool) do update set
    offered = excluded.offered, offered_hash = excluded.offered_hash, offered_at = excluded.offered_at
where t.offered_hash <> excluded.offered_hash and t.taken_hash <> excluded.offered_hash

-- name: accept
-- Only what the operator has seen is taken: a server may have changed it once more.
update mcp_tools set taken = offered, taken_hash = offered_hash, taken_at = clock_timestamp(), taken_by = %(by)s,
    offered = '', offered_hash = '', offered_at = null
where server = %(server)s and tool = %(tool)s and offered_hash = %(hash)s and offered_hash <> ''
returning server, tool, taken, taken_hash, taken_at, taken_by, offered, offered_hash, offered_at
