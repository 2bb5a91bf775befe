"""What many agents ask the database at about the same time, asked once for all of them.

A kernel that takes a thousand agents over, or wakes two hundred, has each of them ask the same twenty questions. Whoever comes while
nobody asks that question asks it at once and alone. Who comes meanwhile waits until there is room, and is asked for together
with all others who wait.

INVARIANT: no answer is older than its question: what is asked together begins after each of its questions came.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Mapping, Sequence
from functools import cache
from typing import Any, Final, Generic, LiteralString, NamedTuple, TypeAlias, TypeVar, cast

import msgspec
from ringfence.kernel.journal.database import statements
from ringfence.kernel.journal.types import JournalError, Unavailable

Question = TypeVar("Question")
Answer = TypeVar("Answer")

Shared: TypeAlias = tuple[tuple[str, Any], ...]
"""Values that all have in common, by name."""

AT_ONCE: Final = 2
"""So many statements of one kind run at a time."""

_ASKED: Final = re.compile(r"-- asked by ([0-9]+): (.+)\n")


class Kind(NamedTuple):
    """A statement that can be asked for many.

    Attributes:
        most: for so many at a time, as all that they answer is in memory then.
        names: of the values that differ from agent to agent.
        text: for many: takes `asked`, an array of objects with these values and `nr_`. The first column says whose a row is.
    """

    most: int
    names: tuple[str, ...]
    text: LiteralString


@cache
def kind_of(name: str) -> Kind | None:
    """How `file.statement` is asked for many; None: it is not, for it doesn't say at its beginning what differs."""
    file, _, key = name.partition(".")
    text = statements(file)[key]
    told = _ASKED.match(text)
    if told is None:
        return None
    most, columns = told.groups()
    names = tuple(column.split()[0] for column in columns.split(", "))
    body = text[told.end() :]
    for one in names:
        body = body.replace(f"%({one})s", f"asked.{one}")
    whole = statements("together")["each"].replace("/*columns*/", columns).replace("/*statement*/", body)
    # All of it is from the files, which are part of the program.
    return Kind(int(most), names, cast("LiteralString", whole))


def parts_of(kind: Kind, values: Mapping[str, Any]) -> tuple[dict[str, Any], Shared]:
    """The values that differ from agent to agent, and the others."""
    own = {name: values[name] for name in kind.names}
    return own, tuple((name, value) for name, value in values.items() if name not in own)


def asked_json(questions: Sequence[Mapping[str, Any]]) -> str:
    """What `Kind.text` takes."""
    return msgspec.json.encode([{"nr_": nr, **one} for nr, one in enumerate(questions)]).decode()


class Together(Generic[Question, Answer]):
    """Questions of one kind.

    Args:
        one: asks one of them.
        many: asks several; gives the answers in their order.
        most: so many at a time.
    """

    def __init__(
        self,
        one: Callable[[Question], Awaitable[Answer]],
        many: Callable[[Sequence[Question]], Awaitable[Sequence[Answer]]],
        most: int,
    ) -> None:
        self._one, self._many, self._most = one, many, most
        self._running = 0
        self._waiting: deque[tuple[Question, asyncio.Future[Answer]]] = deque()
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def idle(self) -> bool:
        """Whether nobody asks."""
        return not self._running

    async def ask(self, question: Question) -> Answer:
        """Ask one question.

        Raises:
            Unavailable: the database is away.
            JournalError: it refused.
        """
        if self._running < AT_ONCE:
            self._running += 1
            try:
                return await self._one(question)
            finally:
                self._over()
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._waiting.append((question, answer))
        return await answer

    def _over(self) -> None:
        self._running -= 1
        some: list[tuple[Question, asyncio.Future[Answer]]] = []
        while self._waiting and len(some) < self._most:
            question, answer = self._waiting.popleft()
            if not answer.done():  # who asked was cancelled
                some.append((question, answer))
        if some:
            self._running += 1
            task = asyncio.create_task(self._ask(some))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _ask(self, some: Sequence[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            await self._answer(some)
        except BaseException as error:
            for _, answer in some:
                if not answer.done():
                    answer.set_exception(Unavailable(f"the question was dropped: {type(error).__name__}"))
            raise
        finally:
            self._over()

    async def _answer(self, some: Sequence[tuple[Question, asyncio.Future[Answer]]]) -> None:
        try:
            answers = await self._many([question for question, _ in some])
        except Unavailable as error:
            for _, answer in some:
                _give(answer, error=Unavailable(str(error)))
        except JournalError:
            # One of them is refused, and says so to whoever asked it.
            for question, answer in some:
                await self._alone(question, answer)
        else:
            for (_, answer), found in zip(some, answers, strict=True):
                _give(answer, found)

    async def _alone(self, question: Question, answer: asyncio.Future[Answer]) -> None:
        if answer.done():
            return
        try:
            found = await self._one(question)
        except JournalError as error:
            _give(answer, error=error)
        else:
            _give(answer, found)


def _give(answer: asyncio.Future[Any], found: Any = None, *, error: Exception | None = None) -> None:
    if answer.done():
        return
    if error is None:
        answer.set_result(found)
    else:
        answer.set_exception(error)


class Questions(Generic[Question, Answer]):
    """Questions of all kinds, as long as somebody asks them.

    Args:
        make: makes one kind.
    """

    def __init__(self, make: Callable[[Any], Together[Question, Answer]]) -> None:
        self._make = make
        self._kinds: dict[Hashable, Together[Question, Answer]] = {}

    async def ask(self, kind: Hashable, question: Question) -> Answer:
        """Ask one question of a kind."""
        found = self._kinds.get(kind)
        if found is None:
            found = self._kinds[kind] = self._make(kind)
        try:
            return await found.ask(question)
        finally:
            if found.idle and self._kinds.get(kind) is found:
                del self._kinds[kind]
