-- Parked calls that wait for a person. `arguments` and `edited` are canonical JSON; `asks` says which rules asked about what;
-- `versions` holds how the target stood when it was asked. Rows are marked, never removed.
create table approvals (
    key        bigint generated always as identity primary key,
    agent      bigint not null references agents,
    step       bigint not null,
    branch     integer not null,
    lane       text not null,
    lane_step  integer not null,
    action     text not null,
    resource   text not null,
    effect     text not null,
    arguments  text not null,
    digest     text not null,
    edited     text,
    asks       jsonb not null,
    versions   jsonb not null default '{}',
    detail     jsonb not null default '{}',
    state      text not null default 'pending' check (state in ('pending', 'approved', 'denied', 'expired', 'voided')),
    created_at timestamptz not null default clock_timestamp(),
    expires_at timestamptz not null,
    decided_at timestamptz,
    decided_by text,
    reason     text not null default ''
);
-- A step waits for one person at a time.
create unique index approvals_pending on approvals (agent, step) where state = 'pending';
-- Adoption and `show` ask for those of one agent.
create index approvals_agent on approvals (agent, step);
