-- Agents that a kernel rolls back together with others: it wants them from the living kernel that owns them. That one answers
-- by making it the owner, or by saying why not. What a dead kernel asked for stands for nothing.
create table handovers (
    agent    bigint primary key references agents on delete cascade,
    asker    bigint not null,
    asked_at timestamptz not null default clock_timestamp(),
    lived    boolean not null default false, -- whether its program was ended for it
    refused  text not null default ''
);
