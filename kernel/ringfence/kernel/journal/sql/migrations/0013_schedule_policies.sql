-- Runs that wait for the end of the present one, by the times they are for, oldest first; and up to when all fires were dealt with,
-- by which a clock that was put back is known.
alter table schedules
    add column queued     timestamptz[] not null default '{}',
    add column settled_at timestamptz not null default clock_timestamp();
