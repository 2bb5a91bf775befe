-- name: kept
-- Which of these an artifact names, hidden ones too: a rollback may show them again.
select distinct f.ref from artifacts f where f.ref = any (%(refs)s::text[])

-- name: named
-- Which of these stand in rows of one chain. Whatever looks like a reference counts as one.
select distinct found.ref[1]
from journal j, regexp_matches(encode(j.body, 'escape'), '[0-9a-f]{64}', 'g') as found (ref)
where j.chain = %(chain)s and position('"artifact"'::bytea in j.body) > 0 and found.ref[1] = any (%(refs)s::text[])
