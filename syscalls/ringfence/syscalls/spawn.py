"""`spawn`: start another agent. Its row and grants are committed with the outcome; its files are there before that."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from ringfence.policy.child import write_manifest
from ringfence.policy.problems import ManifestError
from ringfence.policy.sections import is_name
from ringfence.syscalls.base import Call, Env, Plan, Question, Work
from ringfence.syscalls.errors import BudgetExhausted, InvalidRequest
from ringfence.syscalls.lent import Newborn

INPUT_BYTES_MAX: Final = 1 << 20
MANIFEST_BYTES_MAX: Final = 256 << 10


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The child's manifest in parts, what it gets of the workspace, and its input."""

    name: str = ""
    command: list[str] = []
    workspace: str = ""
    permissions: Any = None
    roles: list[str] = []
    delegates: list[str] = []
    env: dict[str, str] = {}
    input: bytes = b""
    budgets: Any = None
    sandbox: Any = None
    approvals: Any = None
    restart: Any = None
    labels: dict[str, str] = {}


class Result(msgspec.Struct, frozen=True):
    """Id and name of the child."""

    id: str
    name: str


def plan(arguments: Arguments, env: Env) -> Plan:
    """Write the manifest and have it read.

    Raises:
        InvalidRequest: the manifest is wrong, names what the kernel doesn't have, or asks for more than can be given.
    """
    if not is_name(arguments.name):
        raise InvalidRequest(
            f"`{arguments.name[:200]}` is no name for an agent; use up to 63 letters, digits, `.`, `-` and `_`"
        )
    if len(arguments.input) > INPUT_BYTES_MAX:
        raise InvalidRequest(
            f"the input has {len(arguments.input)} bytes; at most {INPUT_BYTES_MAX} fit, put it in the workspace"
        )
    try:
        text = write_manifest(arguments.name, arguments.labels, _spec(arguments))
        if len(text.encode()) > MANIFEST_BYTES_MAX:
            raise InvalidRequest(f"the child's manifest is longer than {MANIFEST_BYTES_MAX} bytes")
        newborn = env.nursery.check(text)
    except ManifestError as error:
        problems = "; ".join(": ".join(filter(None, (p.message, p.fix))) for p in error.problems)
        raise InvalidRequest(f"the manifest of `{arguments.name}` is wrong: {problems}") from error
    question = Question(action="spawn", resource=arguments.name)
    return Plan(resource=arguments.name, questions=(question,), data=newborn)


def _spec(arguments: Arguments) -> dict[str, Any]:
    permissions: Any = arguments.permissions
    if arguments.roles:
        given: dict[str, Any] = {} if permissions is None else permissions
        if not isinstance(permissions, dict | None) or "roles" in given:
            raise InvalidRequest("give roles either as `roles` or in `permissions`, and rules as a mapping")
        permissions = {"roles": arguments.roles, **given}
    return {
        "run": {"command": arguments.command, **({"env": arguments.env} if arguments.env else {})},
        "sandbox": arguments.sandbox,
        "permissions": permissions,
        "delegates": arguments.delegates,
        "budgets": arguments.budgets,
        "approvals": arguments.approvals,
        "restart": arguments.restart,
    }


async def prepare(call: Call, arguments: Arguments) -> Work:
    """Make the child's files and reserve its totals; says what to commit.

    Raises:
        InvalidRequest, NoSuchResource: the workspace can't be copied, or a total is missing.
        BudgetExhausted: its totals are more than the parent has left.
    """
    newborn: Newborn = call.plan.data
    await call.failpoint("before_files")
    values = await call.env.nursery.lay_out(call.step, newborn, arguments.workspace)
    await call.failpoint("after_files")
    return Work(statement="spawn", values={**values, "input": arguments.input})


async def settle(call: Call, arguments: Arguments, done: Any) -> None:
    """Start the child, or take its files away where it was not committed."""
    del arguments
    await call.env.nursery.settle(call.step, born=done is not None)


def finish(arguments: Arguments, done: dict[str, Any]) -> Result:
    """What the agent gets once it is committed.

    Raises:
        BudgetExhausted: there are as many agents already as there may be.
    """
    if "id" in done:
        return Result(id=done["id"], name=done["name"])
    raise BudgetExhausted(
        f"`{arguments.name}` was not spawned: it would be in generation {done['depth']}, its parent has {done['own']} children "
        f"and the tree {done['tree']} agents that have not ended; the most are in docs/limits.md, kill some first",
        budget="children",
    )
