-- Agents that an operator removed. Their rows in the journal stay: it is append-only.
create table removed (
    agent bigint primary key references agents,
    at    timestamptz not null default clock_timestamp(),
    by    text not null
);
