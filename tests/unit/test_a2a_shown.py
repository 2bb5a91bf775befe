"""What clients of the A2A door are shown of a task."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from ringfence.kernel.a2a import shown
from ringfence.kernel.journal.store_tasks import TaskEvent, TaskRecord

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TASK = TaskRecord(
    id="k1",
    context="c1",
    state="working",
    events=1,
    bytes=0,
    created_at=NOW,
    updated_at=NOW,
    agent="a1",
    agent_state="running",
    waits="",
    error="",
    approval=None,
)
ASKS = TaskEvent(
    seq=2, kind="told", state="input-required", is_json=False, body="how many?", artifact="", at=NOW
)


def test_a_task_stands_as_its_newest_entry_says_whichever_of_them_was_read_first() -> None:
    now = shown.as_of(TASK, [ASKS])
    assert (now.state, now.events) == ("input-required", 2)
    # What comes next finds nothing changed, so nothing is told twice.
    assert shown.now_state(now) == shown.now_state(replace(TASK, state="input-required", events=2))


def test_a_task_that_was_read_after_its_entries_stands_as_it_was_read() -> None:
    later = replace(TASK, state="completed", events=3)
    assert shown.as_of(later, [ASKS]) is later
    assert shown.as_of(TASK, []) is TASK
