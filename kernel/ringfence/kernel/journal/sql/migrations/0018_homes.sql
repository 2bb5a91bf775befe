-- Whose data directory has the newest files of an agent whose files are in a shared store as well; empty: they are in no such store.
alter table agents add column home text not null default '';
