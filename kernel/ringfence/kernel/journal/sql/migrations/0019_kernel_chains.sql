-- Moves rows out of the journal that a file holds: notes the part, carries what they spent, and removes them, all or nothing.
-- Answers how many were removed; null: this kernel may not write the chain, and nothing was done.
create or replace function journal_archive(p_kernel bigint, p_fence bigint, p_part jsonb, p_gone bigint[]) returns integer
language plpgsql as $$
declare
    part segments := jsonb_populate_record(null::segments, p_part || jsonb_build_object('at', clock_timestamp()));
    gone integer;
begin
    perform pg_advisory_xact_lock_shared(part.chain);
    -- An agent's chain is its owner's. A kernel's own is also that of its successors on the same data directory.
    if not exists (select from agents a where a.key = part.chain and a.owner = p_kernel)
        and not exists (select from kernels me join kernels k on k.key <= me.key and k.host = me.host and k.data_dir = me.data_dir
            where me.key = p_kernel and k.key = -part.chain)
        or not exists (select from kernels n
            where n.key = p_kernel and n.fence = p_fence and n.lease_until > clock_timestamp()) then
        return null;
    end if;
    insert into segments select part.*;
    insert into carried as c (chain, run, ended_us, last_step, steps, calls, destructive, external, denied, tokens, usd, bytes)
    select part.chain, s.run, s.ended_us, max(s.step), count(*), count(*) filter (where s.spent),
        count(*) filter (where s.spent and s.destroy), count(*) filter (where s.spent and s.external),
        count(*) filter (where s.denied), coalesce(sum((s.amounts ->> 'tokens')::float8), 0),
        coalesce(sum((s.amounts ->> 'usd')::float8), 0), coalesce(sum((s.amounts ->> 'bytes')::float8), 0)
    from (
        select j.step, (select coalesce(max(b.cut_step), 0) from branches b
                where b.agent = part.chain and b.parent is null and b.cut_step < j.step) as run,
            -- The end of the hour: what ended in it counts as long as any of it may.
            (max(j.started_us + j.duration_us) / 3600000000 + 1) * 3600000000 as ended_us,
            bool_or(j.verdict in ('allow', 'ask') and j.outcome <> 'parked')
                and not bool_or(j.phase = 1 and j.outcome in ('denied', 'refused')) as spent,
            bool_or(j.effect = 'DESTROY') as destroy,
            bool_or(j.effect = 'EXTERNAL') as external,
            bool_or(j.verdict = 'deny' or j.outcome = 'denied') as denied,
            (array_agg(case when substring(j.body for 6) in ('{"used', '{"fact') then body_amounts(j.body) end order by j.pos desc)
                filter (where j.phase = 1 and j.outcome <> 'parked'))[1] as amounts
        from journal j
        where j.chain = part.chain and j.pos = any (p_gone) and j.phase in (0, 1) and j.step > 0
        group by j.step) s
    group by s.run, s.ended_us
    on conflict (chain, run, ended_us) do update set last_step = greatest(c.last_step, excluded.last_step),
        steps = c.steps + excluded.steps, calls = c.calls + excluded.calls, destructive = c.destructive + excluded.destructive,
        external = c.external + excluded.external, denied = c.denied + excluded.denied,
        tokens = c.tokens + excluded.tokens, usd = c.usd + excluded.usd, bytes = c.bytes + excluded.bytes;
    perform set_config('ringfence.archiving', 'on', true);
    delete from journal j where j.chain = part.chain and j.pos = any (p_gone);
    get diagnostics gone = row_count;
    perform set_config('ringfence.archiving', 'off', true);
    if gone <> cardinality(p_gone) then
        raise exception 'the rows to archive are not all there';
    end if;
    return gone;
end $$;
