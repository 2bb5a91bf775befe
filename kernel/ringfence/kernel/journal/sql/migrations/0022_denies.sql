-- An operator's deny for one agent stands where its grants do, so that all kernels know of both in the same way.
alter table grants drop constraint grants_verdict_check;
alter table grants add constraint grants_verdict_check check (verdict in ('allow', 'ask', 'deny'));
