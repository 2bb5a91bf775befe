-- Work claims: who works at a key, until when. `fence` counts the takes and never goes back: what names an older one is refused.
-- A row that nobody ever took only holds the place for a lock.
create table claims (
    key   text collate "C" primary key,
    fence bigint not null default 0,
    agent bigint references agents,
    lane  text not null default '',
    step  bigint not null default 0,
    until timestamptz
);
-- A rollback and `layers` ask for those of one agent.
create index claims_agent on claims (agent) where agent is not null;
