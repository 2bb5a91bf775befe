-- Messages from outside taint whoever takes them.
alter table messages add column untrusted boolean not null default false;

-- What hooks were given, by the id that its sender gave it: for a month none of it is put into a mailbox twice.
create table deliveries (
    hook    text not null,
    id      text not null,
    digest  bytea not null,
    agent   bigint not null references agents on delete cascade,
    message bigint not null,
    at      timestamptz not null default clock_timestamp(),
    primary key (hook, id)
);
create index deliveries_at on deliveries (at);
