"""What a program did otherwise than its journal says, and what an operator can do about it."""

from __future__ import annotations

import difflib
import json
from typing import TYPE_CHECKING, Any, Final

from ringfence.kernel.divergence import EVENT
from ringfence.kernel.parking import DIVERGENCE

if TYPE_CHECKING:
    from ringfence.kernel.operations.kernel import Kernel
    from ringfence.kernel.thread import Thread

_LINES_MAX: Final = 200
"""Most lines of the difference."""


async def divergence_of(kernel: Kernel, thread: Thread) -> dict[str, Any] | None:
    """Both calls, their difference, and the ways on; None: the agent does not wait for that.

    Returns:
        `{step, recorded: {action, resource, arguments}, made: {action, arguments}, diff: [line], choices: [{do, command}]}`;
        `arguments` is None where the journal has none, and a text where it was cut.
    """
    if thread.state != "parked" or thread.waiting_for != DIVERGENCE:
        return None
    event = await kernel.core.store.last_event(thread.key, "diverged")
    if event is None:
        return None
    told: dict[str, Any] = json.loads(event.body)
    step = int(told["step"])
    rows = await kernel.core.store.step(thread.key, step)
    bodies: list[dict[str, Any]] = [json.loads(row.body) for row in rows]
    recorded = {
        "action": told["recorded_action"],
        "resource": event.resource,
        "arguments": next((body["arguments"] for body in bodies if "arguments" in body), None),
    }
    made = {"action": told["made_action"], "arguments": _decoded(told["made_arguments"])}
    return {
        "step": step,
        "recorded": recorded,
        "made": made,
        "diff": _difference(recorded, made),
        "choices": _choices(thread.id, max(step - 1, 0)),
    }


async def strays_of(kernel: Kernel, thread: Thread) -> list[dict[str, Any]]:
    """New calls that its program made in its present start while recorded ones were left, the first few.

    Returns:
        `{step, action, recorded_step, recorded_action, differences: [{at, recorded, made}], more, left}`; `step` is None where
        the call came to nothing yet.
    """
    event = await kernel.core.store.last_event(thread.key, EVENT) if thread.replay.last else None
    told: dict[str, Any] = {} if event is None else json.loads(event.body)
    if told.get("generation") != thread.generation:
        return []
    return [await _stray(kernel, thread, one) for one in told["calls"]]


async def _stray(kernel: Kernel, thread: Thread, told: dict[str, Any]) -> dict[str, Any]:
    lane, lane_step = told.pop("lane"), told.pop("lane_step")
    flight = thread.by_lane.get((lane, lane_step))
    row = None if flight is not None else await kernel.core.store.answered(thread.key, lane, lane_step)
    step = flight.step if flight is not None else None if row is None else row.step
    return {"step": step, **{key: value for key, value in told.items() if key != "resource"}}


def _decoded(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text  # it was cut


def _lines(call: dict[str, Any]) -> list[str]:
    return [
        str(call["action"]),
        *json.dumps(call["arguments"], indent=2, sort_keys=True, ensure_ascii=False).splitlines(),
    ]


def _difference(recorded: dict[str, Any], made: dict[str, Any]) -> list[str]:
    lines = list(
        difflib.unified_diff(_lines(recorded), _lines(made), "recorded", "made now", n=3, lineterm="")
    )
    if len(lines) > _LINES_MAX:
        return [*lines[:_LINES_MAX], f"… {len(lines) - _LINES_MAX} more lines"]
    return lines


def _choices(agent: str, before: int) -> list[dict[str, str]]:
    return [
        {
            "do": "take the new way: undo what came after, and go on from before it",
            "command": f"ringfence rollback {agent} --to {before} --start",
        },
        {
            "do": "try the new way on a copy, and leave this one as it is",
            "command": f"ringfence fork {agent} --at {before} --start",
        },
        {
            "do": "keep to the recorded way, where the difference was a chance: start it again",
            "command": f"ringfence start {agent}",
        },
    ]
