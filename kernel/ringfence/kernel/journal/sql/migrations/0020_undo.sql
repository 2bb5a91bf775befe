-- What a receiver learns of an approval: no arguments, no diff, and of a URL no query, which may hold what is nobody's business.
create or replace function announce_approval() returns trigger language plpgsql as $$
declare
    event text;
begin
    if not exists (select from webhooks) then
        return null;
    elsif tg_op = 'INSERT' then
        event := 'approval.asked';
    elsif new.state <> old.state then
        event := 'approval.decided';
    elsif new.state = 'pending' and new.votes <> old.votes then
        event := 'approval.voted';
    else
        return null;
    end if;
    perform announce(event, new.agent, jsonb_build_object(
        'approval', 'a' || new.key, 'step', new.step, 'action', new.action,
        'resource', left(case when new.action like 'http.%' then split_part(new.resource, '?', 1) else new.resource end, 512),
        'effect', new.effect, 'digest', new.digest, 'state', new.state, 'people', new.people,
        'approved_by', (
            select coalesce(jsonb_agg(v.value -> 'by' order by v.nr), '[]')
            from jsonb_array_elements(new.votes) with ordinality as v (value, nr)
            where v.value ->> 'verdict' = 'approved' and not v.value ? 'void'),
        'undo', left(new.detail ->> 'undo', 512), 'edited', new.edited is not null,
        'expires_at', to_char(new.expires_at at time zone 'UTC', 'YYYY-MM-DD"T"HH24:MI:SS.US"Z"'),
        'decided_by', new.decided_by, 'reason', left(nullif(new.reason, ''), 512)));
    return null;
end $$;
