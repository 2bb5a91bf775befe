create table distributions (
    name     text primary key,
    version  text not null,
    licence  text not null,
    family   text not null,
    verified integer not null,
    altered  integer not null,
    missing  integer not null,
    shared   integer not null default 0
);

create table files (
    distribution text not null,
    path         text not null,
    sha256       text,
    size_bytes   bigint,
    primary key (distribution, path)
);

create index files_by_content on files (sha256);
