-- Limits that an operator set for one agent, in place of its manifest's.
create table budgets (
    agent    bigint not null references agents,
    name     text not null,
    kind     text not null check (kind in ('total', 'rate')),
    amount   double precision not null check (amount >= 0),
    period_s double precision check (period_s > 0),
    set_by   text not null,
    at       timestamptz not null default clock_timestamp(),
    primary key (agent, name, kind)
);
