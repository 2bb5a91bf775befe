"""Any calls and commands, rolled back anywhere, killed anywhere: the tree comes back as an independent walker had seen it.

The size follows RINGFENCE_TREE_EXAMPLES and RINGFENCE_TREE_STEPS, for a long run by hand.
"""

from __future__ import annotations

import os
import pickle
import shutil
import struct
import tempfile
from pathlib import Path
from random import Random
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, note, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from support import mutations, walker
from support.mutations import mutate
from support.tree_world import Forge, agent_uid

pytestmark = [pytest.mark.fault]

EXAMPLES = int(os.environ.get("RINGFENCE_TREE_EXAMPLES", "14"))
STEPS = int(os.environ.get("RINGFENCE_TREE_STEPS", "12"))
# Making a failure smaller takes minutes: only where somebody waits for it.
PHASES = [each for each in Phase if each is not Phase.shrink or "RINGFENCE_TREE_SHRINK" in os.environ]

RANDOMS = st.randoms(use_true_random=True)
ACCESS = struct.pack("<I", 2) + b"".join(
    struct.pack("<HHI", *entry)
    for entry in ((1, 6, 2**32 - 1), (2, 4, 12345), (4, 4, 2**32 - 1), (16, 4, 2**32 - 1), (32, 0, 2**32 - 1))
)


def finish(top: Path, listed: str | None) -> None:
    """Owners, access lists, capabilities and times that no command could give."""
    for number, path in enumerate(sorted(top.rglob("*"))):
        if os.geteuid() == 0:
            owner = (agent_uid() or 0) if number % 3 else 1000 + number
            os.chown(path, owner, owner + number % 2, follow_symlinks=False)
    if listed is not None and (top / listed).is_file() and not (top / listed).is_symlink():
        os.setxattr(top / listed, "system.posix_acl_access", ACCESS)
        if os.geteuid() == 0:
            capability = struct.pack("<IIIII", 0x02000000, 1 << 10, 0, 0, 0)
            os.setxattr(top / listed, "security.capability", capability)
    for number, path in enumerate(sorted(top.rglob("*"), reverse=True)):
        os.utime(path, ns=(10**18 + number, 10**18 + number), follow_symlinks=False)


class TreeMachine(RuleBasedStateMachine):
    """Steps of one agent on one tree. `lineage` is its present branch: each step with what was there before it."""

    forge: ClassVar[Forge]

    def __init__(self) -> None:
        super().__init__()
        self.base = Path(tempfile.mkdtemp(prefix="tree-"))
        self.live = self.base / "live"
        self.live.mkdir()
        (self.live / "theirs").mkdir()
        self.step = 0
        self.lineage: list[tuple[int, walker.Tree]] = []
        self.undone: tuple[int, list[tuple[int, walker.Tree]], walker.Tree, str] | None = None

    def teardown(self) -> None:
        for here, names, _ in os.walk(self.base):
            for name in names:
                if not (Path(here) / name).is_symlink():
                    (Path(here) / name).chmod(0o700)
        shutil.rmtree(self.base)

    # -- looking --------------------------------------------------------------------------------------------------

    def look(self) -> walker.Tree:
        return walker.look(self.live)

    def assert_same(self, then: walker.Tree, *without: str) -> None:
        """All but what another program does in a directory of its own."""
        now = walker.without(self.look(), *without)
        assert walker.differences(now, walker.without(then, *without), skip=[b"theirs"]) == []

    # -- steps ----------------------------------------------------------------------------------------------------

    @initialize(random=RANDOMS)
    def plant(self, random: Random) -> None:
        mutate(self.live, mutations.a_tree(random))
        finish(self.live, random.choice([*self.there(), "none"]))

    @rule(random=RANDOMS)
    def write(self, random: Random) -> None:
        data, mode = random.choice(mutations.CONTENTS), random.choice((0, 0o600))
        self.call("fs.write", random, path=self.path(random), data=data, mode=mode)

    @rule(random=RANDOMS)
    def append(self, random: Random) -> None:
        self.call("fs.append", random, path=self.path(random), data=random.choice(mutations.CONTENTS))

    @rule(random=RANDOMS)
    def move(self, random: Random) -> None:
        self.call("fs.move", random, path=self.path(random), to=self.path(random))

    @rule(random=RANDOMS)
    def delete(self, random: Random) -> None:
        self.call("fs.delete", random, path=self.path(random), recursive=True)

    @rule(random=RANDOMS)
    def command(self, random: Random) -> None:
        self.run(random)

    @rule(random=RANDOMS)
    def another_command(self, random: Random) -> None:
        self.run(random)

    def run(self, random: Random) -> None:
        merged = self.base / "merged"
        merged.unlink(missing_ok=True)
        said = [path for path in self.there() if not any(odd in path for odd in mutations.ODD_NAMES)]
        what = mutations.some_mutations(random, said, 8)
        if self.call("exec.run", random, mutations=what) == "ok" and merged.exists():
            seen = pickle.loads(merged.read_bytes())  # noqa: S301 - of our own making
            # What a command's world does not know: owners, times, who has another name, other users' lists; and an overlay
            # that copies a file up may fill its holes.
            self.assert_same(seen, "owner", "mtime_ns", "names", "attributes", "data")
            assert _tags(self.look()) == _tags(seen)

    def there(self) -> list[str]:
        return [os.fsdecode(path) for path in sorted(self.look()) if path and not path.startswith(b"theirs")]

    def path(self, random: Random) -> str:
        return mutations.a_path(random, self.there())

    def call(self, action: str, random: Random, **arguments: Any) -> str:
        kills = mutations.some_kills(random)
        self.step += 1
        before = self.look()
        answer, *left = self.go(kills, "call", action, self.step, arguments)
        while answer == "killed":
            answer, *left = self.go(left, "recover", action, self.step, arguments)
            if answer == "rerun":
                self.assert_same(before)
                answer, *left = self.go(left, "call", action, self.step, arguments)
        note(f"{self.step}: {action} {arguments} {kills}: {answer}")
        if answer == "ok" and (self.base / f"points/p{self.step}.json").exists():
            self.lineage.append((self.step, before))
        else:
            self.assert_same(before)
        return answer

    def go(self, kills: Any, method: str, *arguments: Any) -> tuple[Any, ...]:
        now, *later = kills or (0,)
        return self.forge.do(self.base, method, *arguments, die_at=now), *later

    @rule(random=RANDOMS)
    def others(self, random: Random) -> None:
        (self.live / "theirs" / random.choice(mutations.NAMES)).write_bytes(random.choice(mutations.CONTENTS))

    # -- rollback -------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.lineage)
    @rule(random=RANDOMS)
    def rollback(self, random: Random) -> None:
        cut = random.randrange(len(self.lineage))
        points = [f"p{step}" for step, _ in reversed(self.lineage[cut:])]
        theirs = walker.look(self.live / "theirs")
        before, then = self.look(), self.lineage[cut][1]
        own = self.put_back(points, random)
        self.assert_same(then)
        assert walker.differences(walker.look(self.live / "theirs"), theirs) == []
        self.undone = (cut, self.lineage, before, own)
        self.lineage = self.lineage[:cut]

    @precondition(lambda self: self.undone is not None and len(self.lineage) >= self.undone[0])
    @rule(random=RANDOMS)
    def undo(self, random: Random) -> None:
        assert self.undone is not None
        cut, lineage, before, own = self.undone
        points = [f"p{step}" for step, _ in reversed(self.lineage[cut:])]
        if (self.base / "points" / f"{own}.json").exists():
            points.append(own)
        self.put_back(points, random)
        self.assert_same(before)
        self.lineage, self.undone = lineage, None

    def put_back(self, points: list[str], random: Random) -> str:
        kills = mutations.some_kills(random)
        self.step += 1
        own = f"p{self.step}"
        answer, *left = self.go(kills, "rollback", points, own)
        while answer == "killed":
            answer, *left = self.go(left, "rollback", points, own)
        note(f"{self.step}: rollback {points} {kills}: {answer}")
        assert answer == "ok"
        return own

    @invariant()
    def nothing_is_left_behind(self) -> None:
        staging, scratch = self.base / ".tmp-live", self.base / "scratch"
        assert not (self.base / "points/restoring").exists()
        assert not staging.exists() or list(staging.iterdir()) == []
        assert not scratch.exists() or list(scratch.iterdir()) == []


def _tags(tree: walker.Tree) -> dict[bytes, list[tuple[str, bytes]]]:
    return {
        path: [pair for pair in seen.attributes if pair[0].startswith("user.")] for path, seen in tree.items()
    }


@pytest.fixture(scope="module")
def forge() -> Any:
    made = Forge()
    yield made
    made.close()


def test_any_tree_comes_back_after_any_kill(forge: Forge) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    TreeMachine.forge = forge
    run_state_machine_as_test(
        TreeMachine,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            phases=PHASES,
            suppress_health_check=list(HealthCheck),
        ),
    )
