-- name: declare
-- What a kernel file says now, in place of what the same data directory declared before; events of what is gone are gone too.
with given as (
    select g ->> 'name' as name, array(select jsonb_array_elements_text(g -> 'events')) as events
    from jsonb_array_elements(%(hooks)s::jsonb) g),
gone as (
    delete from webhooks w
    where w.host = %(host)s and w.data_dir = %(data_dir)s and not exists (select from given where given.name = w.name)
    returning 1)
insert into webhooks (name, events, host, data_dir)
select given.name, given.events, %(host)s, %(data_dir)s from given
on conflict (name) do update set events = excluded.events, host = excluded.host, data_dir = excluded.data_dir

-- name: hurry
-- A kernel that starts tries at once what an earlier one was about to.
update outbox set next_at = clock_timestamp() where webhook = any (%(names)s) and next_at > clock_timestamp()

-- name: claim
-- Some that are due. Nobody else sends them until the lease is over, so a kernel that dies costs no more than that.
update outbox o set next_at = clock_timestamp() + %(lease_s)s * interval '1 second', attempts = o.attempts + 1
from (
    select key from outbox where webhook = %(webhook)s and next_at <= clock_timestamp()
    order by next_at, key limit %(limit)s for update skip locked) due
where o.key = due.key
returning o.key, o.message, o.body::text as body, o.attempts

-- name: sent
with s as (delete from outbox where key = %(key)s returning webhook)
update webhooks w set delivered_at = clock_timestamp(), failing_since = null, last_error = '' from s where w.name = s.webhook

-- name: failed
with f as (
    update outbox set next_at = clock_timestamp() + %(delay_s)s * interval '1 second' where key = %(key)s returning webhook)
update webhooks w set failing_since = coalesce(w.failing_since, clock_timestamp()), last_error = %(error)s from f where w.name = f.webhook

-- name: sweep
-- Drops what nobody took for too long, and the oldest of a queue that is too long.
with late as (
    select key, webhook from outbox where webhook = any (%(names)s) and created_at < clock_timestamp() - %(age_s)s * interval '1 second'
    union
    select key, webhook from (
        select key, webhook, row_number() over (partition by webhook order by key desc) as nr
        from outbox where webhook = any (%(names)s)) q where q.nr > %(most)s),
gone as (delete from outbox o using late where o.key = late.key returning o.webhook),
counted as (select webhook, count(*) as dropped from gone group by webhook)
update webhooks w set dropped = w.dropped + c.dropped from counted c where w.name = c.webhook

-- name: state
select w.name, w.events, w.delivered_at, w.failing_since, w.last_error, w.dropped, count(o.key) as waiting, min(o.created_at) as oldest_at
from webhooks w left join outbox o on o.webhook = w.name
where w.name = any (%(names)s)
group by w.name order by w.name

-- name: forget_deliveries
delete from deliveries where at < clock_timestamp() - %(age_s)s * interval '1 second'
