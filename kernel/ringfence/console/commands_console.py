"""`console`: a prompt with short commands that tells of new approvals; a script's lines where nobody sits."""

from __future__ import annotations

import contextlib
import signal
import sys
from typing import TYPE_CHECKING, Any

import click
from ringfence.console import completion, render
from ringfence.console.documents import record, records
from ringfence.console.durations import plural
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.guard import complain
from ringfence.console.keys import Keys
from ringfence.console.line_mode import HELP, QUIT, SHORT, help_lines, split, translate
from ringfence.console.session import Commands, Redial, Session
from ringfence.console.text import safe

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable, Sequence
    from types import FrameType

commands = Commands()

PROMPT = "ringfence> "
_LOOK_S = 1.0
_ANSWER_S = 2.0
_LEAVE = frozenset({QUIT, "exit", "q"})
_APPROVAL_WORDS = frozenset({"approve", "deny"})


@commands.add(
    "console",
    "ringfence console",
    "printf 'ps\\napprovals\\n' | ringfence console --json",
)
@click.option("--web", is_flag=True, help="Not in this release: refused.")
def console(session: Session, web: bool) -> int:
    """Decide and look around at a prompt; `help` lists its words.

    New approvals are told as they come. Without a terminal it runs the lines of its input, up to the first that fails.
    """
    if web:
        raise ConsoleError(
            "there is no web console in this release; use `ringfence console` without `--web`, or `ringfence top`",
            ExitCode.USAGE,
        )
    return _Prompt(session).run() if session.on_terminal else _script(session, sys.stdin)


def _script(session: Session, lines: Iterable[str]) -> int:
    """Run lines until one fails: what follows may rest on it."""
    for line in lines:
        words = split(line)
        if not words:
            continue
        if words[0] in _LEAVE:
            break
        code = _run(session, words)
        if code != ExitCode.OK:
            return code
    return ExitCode.OK


def _run(session: Session, words: Sequence[str]) -> int:
    """Run one line as a command of its own, whose errors are its own lines on standard error."""
    if words[0] in (HELP, "?"):
        for line in help_lines():
            render.say(line)
        return ExitCode.OK
    root = session.context.find_root().command
    place = ["--connect", session.connect] if session.connect else ["--data", str(session.data)]
    try:
        command = translate(words, getattr(root, "commands", {}))
        root.main([*place, *(["--json"] if session.as_json else []), *command], "ringfence")
    except ConsoleError as error:
        complain(error.message)
        return error.code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else ExitCode.UNWELL
    return ExitCode.OK


class _Prompt:
    """A person's prompt. Between two keys it looks for new approvals; a line being typed is not disturbed."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._kernel = Redial(session)
        self._keys = Keys()
        self._known: set[str] = set()
        self._away = False
        self._breakable = False
        session.context.call_on_close(self._kernel.close)

    def run(self) -> int:
        """Run until the person leaves."""
        # Without a kernel there is nothing to look at: this ends as every command would.
        status = self._kernel.call("Status", _ANSWER_S)
        editing = _line_editing(self._session)
        agents = sum(int(number) for number in record(status, "agents").values())
        render.say(
            f"kernel {safe(status.get('version', ''))}, {plural(agents, 'agent')}; `help` lists the commands"
        )
        for line in self._news():
            render.say(line)
        with self._interrupts():
            while not self._turn(editing):
                pass
        return ExitCode.OK

    @contextlib.contextmanager
    def _interrupts(self) -> Generator[None]:
        """Let Ctrl-C break off what is breakable, and nothing at any other moment: not the console, between two lines."""

        def broken(signum: int, frame: FrameType | None) -> None:
            if self._breakable:
                signal.default_int_handler(signum, frame)

        before = signal.getsignal(signal.SIGINT)
        if before is signal.default_int_handler:
            signal.signal(signal.SIGINT, broken)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    def _turn(self, editing: bool) -> bool:
        """Wait for a line and run it; whether the person leaves."""
        # INVARIANT: an interrupt is raised at calls only, so none is between a call's end and the assignment behind it.
        try:
            self._breakable = True
            line = self._line(editing)
            leaves = self._typed(line)
            self._breakable = False
        except EOFError:
            self._breakable = False
            render.say()
            return True
        except KeyboardInterrupt:
            # As in a shell: the line is dropped, or what it began broken off, and the person stays.
            self._breakable = False
            render.say()
            return False
        return leaves

    def _line(self, editing: bool) -> str:
        """Wait for a line. Only the first key hands over to the line editor, so that news can be told before."""
        try:
            with self._keys.waiting():
                while not self._keys.pressed(_LOOK_S, PROMPT):
                    for line in self._news():
                        self._keys.tell(line)
        finally:
            self._keys.clear()
        if editing:
            return input(PROMPT)
        sys.stdout.write(PROMPT)
        sys.stdout.flush()
        typed = sys.stdin.readline()
        if not typed:
            raise EOFError
        return typed

    def _typed(self, line: str) -> bool:
        """Run a line; whether it was the last one."""
        try:
            words = split(line)
        except ConsoleError as error:
            complain(error.message)
            return False
        if not words:
            return False
        if words[0] in _LEAVE:
            return True
        return _run(self._session, words) == ExitCode.PIPE

    def _news(self) -> list[str]:
        """Lines about what is new since the last look."""
        try:
            waiting = records(self._kernel.call("Approvals", _ANSWER_S), "approvals")
        except ConsoleError as error:
            lost = not self._away
            self._away = True
            return [f"! {safe(error.message)}"] if lost else []
        news = ["! the kernel answers again"] if self._away else []
        self._away = False
        news += [_approval_line(found) for found in waiting if found["id"] not in self._known]
        self._known = {found["id"] for found in waiting}
        return news


def _approval_line(waits: dict[str, Any]) -> str:
    who = waits.get("name") or waits.get("agent")
    asks = f"{waits.get('action')} {waits.get('resource') or ''}".rstrip()
    return f"! {safe(waits['id'])}: {safe(who)} asks for {safe(asks)}; show {safe(waits['id'])}"


def _line_editing(session: Session) -> bool:
    """Arrow keys, a history that ends with the console, and Tab; False where Python was built without."""
    try:
        import readline  # noqa: PLC0415 - importing it changes how every `input` works
    except ImportError:
        return False
    found: list[str] = []

    def complete(text: str, state: int) -> str | None:
        if state == 0:
            found[:] = _candidates(session, readline.get_line_buffer()[: readline.get_begidx()].split(), text)
        return found[state] if state < len(found) else None

    readline.set_completer(complete)
    readline.set_completer_delims(" \t\n")
    readline.parse_and_bind("tab: complete")
    return True


def _candidates(session: Session, before: Sequence[str], text: str) -> list[str]:
    if not before:
        return [f"{word} " for word in (*SHORT, HELP, QUIT) if word.startswith(text)]
    asks = [completion.approvals] if before[0] in _APPROVAL_WORDS else [completion.agents]
    if before[0] == "show":
        asks = [completion.approvals, completion.agents]
    try:
        words = [word for ask in asks for word, _ in ask(session, {})]
    except ConsoleError:
        return []
    return [f"{word} " for word in words if word.startswith(text)]
