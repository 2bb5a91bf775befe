-- A checkpoint may be stored packed, and as what changed since an earlier one of its lineage.
alter table checkpoints add column packing smallint not null default 0;
alter table checkpoints add column base bigint;
alter table checkpoints add foreign key (agent, base) references checkpoints;
