-- Where clients are told of their tasks. `seen` is the last entry that was taken there, so what is not delivered stays to be.
-- `next_at` is also the lease of whoever sends.
create table task_pushes (
    task          text not null references tasks on delete cascade,
    id            text not null,
    url           text not null,
    token         text not null,
    scheme        text not null,
    credentials   text not null,
    seen          integer not null,
    over          boolean not null default false,
    attempts      integer not null default 0,
    failing_since timestamptz,
    last_error    text not null default '',
    next_at       timestamptz not null default clock_timestamp(),
    primary key (task, id)
);
create index task_pushes_due on task_pushes (next_at) where not over;
