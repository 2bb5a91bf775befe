"""`rf.a2a` for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.agent import a2a_operations as operations

if TYPE_CHECKING:
    from ringfence.agent.a2a_operations import PeerAnswer, PeerCard
    from ringfence.agent.calls import Caller


class A2a:
    """Declared agents elsewhere, which take tasks by A2A."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def card(self, peer: str) -> PeerCard:
        """Read what an agent says of itself.

        Args:
            peer: its name in the kernel file.

        Raises:
            Denied: nothing allows it.
            CallFailed: it can't be reached.
        """
        return self._caller.run(operations.card(peer))

    def send(
        self,
        peer: str,
        text: str = "",
        *,
        json: Any = None,
        task: str = "",
        context: str = "",
        skill: str = "",
    ) -> PeerAnswer:
        """Send a message, once, and don't wait for the end of the task that begins with it.

        Args:
            peer: the agent's name in the kernel file.
            text: what is said.
            json: the same as data.
            task: the task that goes on with it; empty: one begins.
            context: what it belongs to, as an earlier answer named it.
            skill: id of the skill that it is for, as the card lists it.

        Raises:
            Denied: a rule or a person denies it, or nothing allows it.
            CallFailed: it failed; `metadata["sent"]` says whether it arrived: `no`, `refused`, `maybe` or `yes`.
            OutcomeUnknown: nobody can tell whether it arrived.
        """
        return self._caller.run(operations.send(peer, text, json, task, context, skill))

    def get(self, peer: str, task: str, *, wait_s: float = 0.0) -> PeerAnswer:
        """Read a task, or wait until it has ended or needs something.

        Args:
            peer: the agent's name in the kernel file.
            task: id that `send` returned.
            wait_s: longest wait in seconds, after which it is returned as it stands; 0: none.

        Raises:
            Denied: a rule or a person denies it, or nothing allows it.
            CallFailed: there is no such task, or the agent can't be reached.
        """
        return self._caller.run(operations.get(peer, task, wait_s))

    def cancel(self, peer: str, task: str) -> PeerAnswer:
        """Say that nothing more is wanted of a task.

        Args:
            peer: the agent's name in the kernel file.
            task: id that `send` returned.

        Raises:
            Denied: a rule or a person denies it, or nothing allows it.
            CallFailed: there is no such task, it has ended, or the agent can't be reached.
        """
        return self._caller.run(operations.cancel(peer, task))
