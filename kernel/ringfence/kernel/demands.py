"""Which walls an agent's sandbox has to have, and that this host can raise them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ringfence.policy.demands import ALL
from ringfence.policy.manifest_types import Demand, SandboxSpec
from ringfence.sandbox.types import Limits, Wall, meets


class WallMissing(Exception):
    """A wall that has to stand does not, or not in the form demanded.

    Args:
        demand: which, and where it is demanded.
        text: why, and what to do.
    """

    def __init__(self, demand: Demand, text: str) -> None:
        super().__init__(text)
        self.line = demand.line
        self.column = demand.column


_EVERY = (Demand(wall=ALL),)


def demanded(agents: Iterable[SandboxSpec], floor: SandboxSpec) -> tuple[str, ...]:
    """What has to stand, as `ProgramSpec.require` has it.

    Args:
        agents: of an agent and all above it: a child's sandbox is no weaker than its parent's.
        floor: of the kernel file.
    """
    demands = [*(floor.require or ()), *(demand for box in agents for demand in box.require or _EVERY)]
    return tuple(sorted({demand.text for demand in demands}))


def check_walls(demands: Sequence[Demand] | None, walls: Sequence[Wall], backend: str) -> None:
    """Hold what is demanded against what was probed, before anything is made.

    The backend holds it once more against each sandbox that it makes.

    Args:
        demands: None: every wall.
        walls: as the backend found them.
        backend: its name.

    Raises:
        WallMissing: it names the wall and the fix.
    """
    for demand in _EVERY if demands is None else demands:
        chosen = [wall for wall in walls if demand.wall in (wall.name, ALL)]
        if not chosen:
            known = ", ".join(wall.name for wall in walls)
            raise WallMissing(demand, f"the sandbox `{backend}` has no wall `{demand.wall}`; it has: {known}")
        for wall in (*chosen, *(wall for wall in walls if wall.required)):
            if not wall.ok:
                lacks = f"this host lacks the sandbox's wall `{wall.name}`: {wall.detail}"
                raise WallMissing(demand, f"{lacks}; {wall.fix}" if wall.fix else lacks)
        if demand.form:
            _check_form(demand, chosen[0])


def _check_form(demand: Demand, wall: Wall) -> None:
    if not wall.form:
        raise WallMissing(demand, f"the wall `{wall.name}` has one form only; write `{wall.name}`")
    if not meets(wall.form, demand.form):
        fix = wall.fix or f"write `{wall.name}` to accept it"
        raise WallMissing(
            demand, f"the wall `{wall.name}` stands as `{wall.form}` here, not as `{demand.form}`; {fix}"
        )


def limits_in(boxes: Sequence[SandboxSpec]) -> Limits:
    """The smallest of each limit: a child's sandbox is no larger than its parent's."""
    return Limits(
        memory_bytes=min(box.memory_bytes for box in boxes),
        pids=min(box.pids for box in boxes),
        cpu=min(box.cpu for box in boxes),
        disk_bytes=min(box.disk_bytes for box in boxes),
        timeout_s=min(box.timeout_s for box in boxes),
    )
