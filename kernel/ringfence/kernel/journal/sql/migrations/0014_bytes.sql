-- Budgets of bytes: calls of every kind may say what they carried, not those of models alone.
create or replace function pool_recount(p_agent bigint, p_name text, p_since_us bigint) returns double precision
language sql stable as $$
    select case when p_name in ('calls', 'destructive') then (
        select count(*) filter (where s.spent and (p_name = 'calls' or s.destroy) and (s.open or s.ended_us >= p_since_us))
        from (
            select bool_or(verdict in ('allow', 'ask') and outcome <> 'parked')
                    and not bool_or(phase = 1 and outcome in ('denied', 'refused')) as spent,
                bool_or(effect = 'DESTROY') as destroy,
                not bool_or(phase = 1 and outcome <> 'parked') as open,
                max(started_us + duration_us) as ended_us
            from journal where chain = p_agent and phase in (0, 1) and step > 0 group by step) s)::float8
    else (
        select coalesce(sum((a.amounts ->> p_name)::float8), 0)
        from (
            select distinct on (step) phase, started_us + duration_us as ended_us, body_amounts(body) as amounts
            from journal
            where chain = p_agent and phase in (0, 1) and (p_name = 'bytes' or starts_with(action, 'llm.'))
                and outcome <> 'parked'
            order by step, phase desc, pos desc) a
        where a.phase = 0 or a.ended_us >= p_since_us)
    end
$$;
