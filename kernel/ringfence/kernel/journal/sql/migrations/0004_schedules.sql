-- Agents without a process that wait: `asleep`, with the time that the first wait ends by itself.
alter table agents add column asleep boolean not null default false, add column wake_at timestamptz;

-- Schedules of agents that have one. A run is a thread of its own on a branch without a parent.
create table schedules (
    agent        bigint primary key references agents,
    next_at      timestamptz,
    paused       boolean not null default false,
    running      boolean not null default false,
    runs         integer not null default 0,
    last_at      timestamptz,
    last_outcome text not null default '',
    last_error   text not null default ''
);
