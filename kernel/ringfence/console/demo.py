"""`ringfence demo`: the main job on real input. Every scene does the thing, then checks it from outside."""

from __future__ import annotations

import contextlib
import os
import platform
import secrets
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from ringfence.console import demo_crashes, demo_people, demo_undo, demo_walls, demo_work
from ringfence.console.demo_report import Narrator
from ringfence.console.demo_warden import Warden, remove
from ringfence.console.demo_world import DemoError, World
from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.render import note
from ringfence.kernel.config import VERSION
from ringfence.kernel.journal.types import JournalError

SCENES: tuple[Callable[[World], None], ...] = (
    demo_crashes.start,
    demo_crashes.kill_agent,
    demo_crashes.kill_kernel,
    demo_walls.destroy,
    demo_work.check_work,
    demo_walls.refuse,
    demo_walls.hide,
    demo_walls.find_canaries,
    demo_walls.revoke,
    demo_undo.roll_back,
    demo_undo.go_on,
    demo_people.ask_model,
    demo_people.approve,
    demo_people.stop_runaway,
    demo_people.wake,
    demo_undo.prove,
    demo_undo.end,
)


def main(*, data: Path | None, as_json: bool) -> int:
    """Run the demo.

    Args:
        data: directory to work in, which must be missing or empty and is removed at the end; None: a temporary one.
        as_json: print one document at the end instead of the story.

    Returns:
        0 when every fact holds, else 1.

    Raises:
        ConsoleError: the directory can't be used.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    root = _prepare(data)
    tell = Narrator(as_json=as_json)
    trouble = ""
    try:
        warden = Warden()
        world = World(
            root=root,
            tell=tell,
            warden=warden,
            secret=f"rf-secret-{secrets.token_hex(16)}",
            ambient=f"rf-ambient-{secrets.token_hex(16)}",
        )
        scene = SCENES[0]
        try:
            for scene in SCENES:
                scene(world)
        except (DemoError, ConsoleError, JournalError) as error:
            trouble = str(error)
        except (LookupError, StopIteration, ValueError, TypeError, OSError) as error:
            # The story met something that it doesn't know; what was checked so far is still worth telling.
            trouble = f"{scene.__name__}: {type(error).__name__}: {error}"
        finally:
            _clean_up(world)
    finally:
        remove(root)
    tell.finish(trouble, {"version": VERSION, "python": platform.python_version(), "root": os.geteuid() == 0})
    sys.stdout.flush()
    if trouble:
        note(f"ringfence: the demo could not go on: {trouble}")
    return ExitCode.OK if tell.ok and not trouble else ExitCode.UNWELL


def _prepare(data: Path | None) -> Path:
    try:
        if data is None:
            return Path(tempfile.mkdtemp(prefix="ringfence-demo-"))
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        if any(data.iterdir()):
            raise ConsoleError(
                f"`{data}` is not empty; the demo removes its directory at the end, so give it a new one",
                ExitCode.USAGE,
            )
    except OSError as error:
        raise ConsoleError(
            f"`{data}` can't be used: {os_error_text(error)}; give another", ExitCode.USAGE
        ) from None
    return data


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _clean_up(world: World) -> None:
    """Whatever happened: the kernel is stopped, and what is left after that is killed."""
    world.hang_up()
    if world.root.exists():
        with contextlib.suppress(OSError, ConsoleError):
            world.run("down", "--drain", "0", show=False)
    world.close_desk()
    for left in world.warden.end_all():
        note(f"ringfence: ended {left}")
    world.warden.close()
