-- An approval may hold for the same call again, of the same agent, for a while.
alter table approvals add column good_until timestamptz;
create index approvals_standing on approvals (agent, digest) where good_until is not null;
