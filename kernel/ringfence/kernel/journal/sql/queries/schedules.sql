-- name: create
insert into schedules (agent, next_at) values (%(agent)s, %(next_at)s)

-- name: asleep
update agents set state = 'sleeping', waiting_for = %(waiting_for)s where key = %(agent)s

-- name: by_agent
select agent, next_at, paused, running, runs, last_at, last_outcome, last_error, queued, settled_at
from schedules where agent = %(agent)s

-- name: list
select s.agent, s.next_at, s.paused, s.running, s.runs, s.last_at, s.last_outcome, s.last_error,
    s.queued, s.settled_at
from schedules s order by s.agent

-- name: owned
-- Whoever changes the schedule of an agent, or begins a run, still owns it: read under the agent's lock.
select 1 from agents a join kernels k on k.key = a.owner
where a.key = %(agent)s and k.key = %(kernel)s and k.fence = %(fence)s and k.released_at is null
    and k.lease_until > clock_timestamp()

-- name: begin
update schedules set running = true, runs = runs + 1, last_at = clock_timestamp(), last_outcome = '', last_error = '',
    next_at = %(next_at)s, queued = %(queued)s::timestamptz[], settled_at = %(settled_at)s
where agent = %(agent)s and not running and next_at is not distinct from %(expected)s
    and queued = %(expected_queue)s::timestamptz[]
returning agent, next_at, paused, running, runs, last_at, last_outcome, last_error,
    queued, settled_at

-- name: first_branch_of_run
insert into branches (agent, branch, parent, cut_step)
select %(agent)s, max(branch) + 1, null, %(cut_step)s from branches where agent = %(agent)s
returning branch, parent, cut_step, created_at

-- name: begin_agent
update agents set thread = %(thread)s, branch = %(branch)s, state = 'pending', waiting_for = '', error = '', restarts = 0,
    exit_code = null, started_at = null, ended_at = null, asleep = false, wake_at = null
where key = %(agent)s
returning key, id, name, thread, labels, branch, state, waiting_for, error, manifest, source, input, epoch, acked_epoch,
    owner, uid, restarts, exit_code, created_at, started_at, ended_at, asleep, wake_at

-- name: finish
update schedules set running = false, last_outcome = %(outcome)s, last_error = %(error)s
where agent = %(agent)s and running
returning agent, next_at, paused, running, runs, last_at, last_outcome, last_error,
    queued, settled_at

-- name: move
update schedules set next_at = %(next_at)s, paused = %(paused)s, queued = %(queued)s::timestamptz[],
    settled_at = %(settled_at)s
where agent = %(agent)s
returning agent, next_at, paused, running, runs, last_at, last_outcome, last_error,
    queued, settled_at

-- name: reopen
-- Who rolls a run back goes on with it.
update schedules set running = true where agent = %(agent)s

-- name: run_told
select 1 from journal where chain = %(agent)s and step = 0 and action = 'schedule.run'
    and position(convert_to(%(thread)s, 'UTF8') in body) > 0 limit 1
