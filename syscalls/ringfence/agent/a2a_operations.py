"""Operations on declared agents elsewhere, for both front ends; no I/O."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ringfence.agent import wire
from ringfence.agent.errors import InvalidRequest
from ringfence.agent.operations import Json, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_OVER: Final = frozenset({"completed", "failed", "canceled", "rejected"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAnswer:
    """A task as it stands, or what was answered without one.

    Attributes:
        task: its id; empty: the agent answered by a message, and there is no task.
        context: id of what it belongs to.
        state: `submitted`, `working`, `input-required`, `auth-required`, `completed`, `failed`, `canceled` or `rejected`; empty: no task.
        message: what the agent said last, as the protocol has a message; None: nothing.
        artifacts: results, each as the protocol has an artifact.
    """

    task: str
    context: str
    state: str
    message: Mapping[str, Any] | None
    artifacts: Sequence[Mapping[str, Any]]

    @property
    def over(self) -> bool:
        """Whether nothing more comes."""
        return not self.task or self.state in _OVER

    @property
    def text(self) -> str:
        """All text of the message."""
        return _text(self.message or {})

    def result(self, name: str = "") -> Any:
        """The data of an artifact, or its text; None: there is none.

        Args:
            name: of the artifact; empty: the last one.
        """
        found = [one for one in self.artifacts if not name or one.get("name") == name]
        if not found:
            return None
        data = [part["data"] for part in found[-1].get("parts", ()) if "data" in part]
        return data[0] if data else _text(found[-1])


def _text(said: Mapping[str, Any]) -> str:
    return "\n".join(str(part["text"]) for part in said.get("parts", ()) if "text" in part)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerCard:
    """What an agent elsewhere says of itself, as it was taken.

    Attributes:
        name: that it gives itself.
        description: what it says that it does.
        skills: those that may be named, each as the protocol has it.
        changed: whether it says something else by now, so that messages wait for an operator.
    """

    name: str
    description: str
    skills: Sequence[Mapping[str, Any]]
    changed: bool


def card(peer: str) -> Operation[PeerCard]:
    """Read a card."""

    def decode(result: Json) -> PeerCard:
        return PeerCard(
            name=result.get("name", ""),
            description=result.get("description", ""),
            skills=result.get("skills") or [],
            changed=bool(result.get("changed", False)),
        )

    return Operation("a2a.card", {"peer": peer}, decode)


def send(peer: str, text: str, value: Any, task: str, context: str, skill: str) -> Operation[PeerAnswer]:
    """Send a message."""
    if not text and value is None:
        raise InvalidRequest("the message is empty; write `text` or `json`")
    given: Json = {"peer": peer}
    if value is not None:
        wire.check_plain("the message", value)
        given["json"] = value
    for name, one in (("text", text), ("task", task), ("context", context), ("skill", skill)):
        if one:
            given[name] = one
    return Operation("a2a.send", given, _answer)


def get(peer: str, task: str, wait_s: float) -> Operation[PeerAnswer]:
    """Read a task."""
    given: Json = {"peer": peer, "task": task}
    if wait_s > 0:
        given["wait_ms"] = max(1, round(wait_s * 1000))
    return Operation("a2a.get", given, _answer)


def cancel(peer: str, task: str) -> Operation[PeerAnswer]:
    """End a task."""
    return Operation("a2a.cancel", {"peer": peer, "task": task}, _answer)


def _answer(result: Json) -> PeerAnswer:
    return PeerAnswer(
        task=result.get("task", ""),
        context=result.get("context", ""),
        state=result.get("state", ""),
        message=result.get("message"),
        artifacts=result.get("artifacts") or [],
    )
