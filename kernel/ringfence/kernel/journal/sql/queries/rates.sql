-- name: share
select * from rate_share(%(kernel)s, %(name)s, %(count)s, %(span_s)s, %(tokens)s, %(want)s, %(used)s)
