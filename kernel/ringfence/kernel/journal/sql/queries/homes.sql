-- name: all
-- Of agents that have not ended.
select id, home from agents where home <> '' and state not in ('done', 'failed', 'killed')

-- name: of
select home from agents where key = %(agent)s

-- name: move
-- By its owner alone: one that slept past its lease moves nothing.
update agents set home = %(home)s where key = %(agent)s and owner = %(kernel)s returning key
