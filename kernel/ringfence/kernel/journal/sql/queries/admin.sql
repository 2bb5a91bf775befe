-- name: ping
select 1;

-- name: database_exists
select 1 from pg_database where datname = %s;

-- name: create_database
create database {name};

-- Two-number locks have a space of their own beside the agents' one-number locks.
-- name: migrate_lock
select pg_advisory_lock(1380796999, 1);

-- name: migrate_unlock
select pg_advisory_unlock(1380796999, 1);

-- name: migrations_table
create table if not exists migrations (
    name       text primary key,
    sha256     text not null,
    applied_at timestamptz not null default clock_timestamp()
);

-- name: migrations_applied
select name, sha256 from migrations order by name;

-- name: migration_record
insert into migrations (name, sha256) values (%s, %s);

-- name: role_exists
select 1 from pg_roles where rolname = %s

-- name: create_role
create role {name} login nosuperuser nocreatedb nocreaterole

-- name: own_database
alter database {name} owner to {name}

-- name: close_database
-- Other targets' roles have no business here.
revoke connect on database {name} from public

-- name: table_lines
select t::text from {table} as t order by t::text collate "C"
