"""A small real repair in a git repository, for agents of the command line that run as their makers publish them.

The examples are what is run: their manifests, kernel files and repository, with the place of the packages and the address of
the model's host put in.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.kernels import eventually
from support.npm import packages
from support.scenes import ENDED, Scene, scene_of_its_own
from support.vendors import Talker

EXAMPLES = Path(__file__).parents[2] / "examples"
KEY = "a-key-of-a-host-of-models"
PATIENCE_S = 200.0
"""These programs take seconds of a processor to start, and the machine may be shared by many."""
_WHO = {
    f"GIT_{who}_{what}": value
    for who in ("AUTHOR", "COMMITTER")
    for what, value in (
        ("NAME", "someone"),
        ("EMAIL", "someone@example.com"),
        ("DATE", "2025-12-31T00:00:00Z"),
    )
}
_GIT = {**os.environ, **_WHO, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}


def git(place: Path, *words: str) -> str:
    """What git says of a repository, whoever owns it."""
    argv = ["git", "-c", "safe.directory=*", "-c", "init.defaultBranch=main", "-C", str(place), *words]
    return subprocess.run(argv, env=_GIT, capture_output=True, text=True, check=True).stdout


def repository(example: str, place: Path) -> dict[str, bytes]:
    """The files of an example's workspace, as the first commit of a repository."""
    source = EXAMPLES / example / "repository"
    for path in source.rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            goal = place / path.relative_to(source)
            goal.parent.mkdir(parents=True, exist_ok=True)
            goal.write_bytes(path.read_bytes())
    git(place, "init", "-q")
    git(place, "add", ".")
    git(place, "commit", "-qm", "Begin")
    return tree(place)


@contextmanager
def kernel_of(example: str, host: Talker, server: Any, template: str) -> Iterator[Scene]:
    """A kernel with the kernel file of an example."""
    text = (EXAMPLES / example / "ringfence.yaml").read_text()
    (line,) = (line for line in text.splitlines() if line.strip().startswith("base:"))
    text = text.replace(line, f'      base: "{host.base}"').replace("/opt/agents", str(packages()))
    with scene_of_its_own(server, template, config=text) as scene:
        (secret,) = {word.strip("{} ") for word in text.split("secret:")[1:2]}
        scene.operator.ask("SecretSet", name=secret.split("}")[0].strip(), value=KEY.encode())
        yield scene


def manifest(example: str, name: str, *, file: str = "manifest.yaml", **changes: str) -> str:
    """The manifest of an example, under another name; `changes` are for texts that stand in it once, each by a name for it."""
    text = (EXAMPLES / example / file).read_text().replace("/opt/agents", str(packages()))
    text, changed = re.subn(r"^  name: .*", f"  name: {name}", text, count=1, flags=re.MULTILINE)
    assert changed
    for change in changes.values():
        old, _, new = change.partition(" => ")
        assert text.count(old) == 1, (old, text)
        text = text.replace(old, new)
    return text


def commits(live: Path) -> list[str]:
    """Subjects, newest first."""
    return git(live, "log", "--format=%s").splitlines()


def tree(live: Path) -> dict[str, bytes]:
    """All files beneath a directory."""
    return {str(path.relative_to(live)): path.read_bytes() for path in live.rglob("*") if path.is_file()}


def comes_to(scene: Scene, agent: str, state: str) -> dict[str, Any]:
    """Waits until an agent is in a state that it stays in; others of that kind are an error at once."""

    def there() -> bool:
        at = scene.show(agent)["state"]
        told = (scene.output(agent, stderr=True)[-2000:], scene.operator.steps(agent)[-3:])
        assert at == state or at not in ENDED, (at, told)
        return at == state

    eventually(there, f"{agent} does not come to be {state}", within_s=PATIENCE_S)
    return scene.show(agent)


def held(host: Talker) -> None:
    """Waits until the host holds a reply back."""
    assert host.holding.wait(PATIENCE_S), host.statuses()


def attempts(scene: Scene, agent: str) -> list[int]:
    """How often each call of a model was made."""
    return [step["attempts"] for step in scene.operator.steps(agent) if step["action"] == "llm.complete"]


WAITS = "; rf-call messages.receive '{}' > /dev/null"
"""Keeps a command of an agent's shell from ending, after what it did, until the agent is sent a message."""
MAY_WAIT = '    allow:\n =>     allow:\n      - messages.receive: "*"\n'


def killed_before_its_report(scene: Scene, agent: str) -> None:
    """Kills the agent alone, behind what a command that `WAITS` did and before the program hears of it. The next start doesn't wait."""

    def waits() -> bool:
        made = [(step["resource"], step["outcome"]) for step in scene.operator.steps(agent)]
        return ("before messages.receive", "ok") in made

    eventually(waits, "no command waits", within_s=PATIENCE_S)
    assert commits(scene.live(agent)) == ["Add, not subtract", "Begin"]
    scene.kill_program(agent)
    scene.operator.ask("Send", agent=agent, text="go on")


def kill_parent(scene: Scene, agent: str) -> None:
    """Kills the process that made the agent's sandbox and waits for it, and with that the sandbox."""
    pid = scene.show(agent)["pid"]
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert scene.kernel.process is not None
    assert parent not in (1, scene.kernel.process.pid)
    os.kill(parent, signal.SIGKILL)
    eventually(lambda: scene.show(agent)["pid"] != pid, f"the sandbox of {agent} lives on")
