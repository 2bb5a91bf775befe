-- Tools of MCP servers as their definitions were taken, and the other one that a server offers by now.
create table mcp_tools (
    server text not null,
    tool text not null,
    taken text not null,
    taken_hash text not null,
    taken_at timestamptz not null default clock_timestamp(),
    taken_by text not null,
    offered text not null default '',
    offered_hash text not null default '',
    offered_at timestamptz,
    primary key (server, tool));
