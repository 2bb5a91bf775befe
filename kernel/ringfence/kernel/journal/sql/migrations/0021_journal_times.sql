-- Who read what is undone, and who did something since a time, is asked of all agents. Rows come in the order of their times, so this is small.
create index journal_times on journal using brin (started_us);
