"""Any tree, any calls: a rollback to any step brings back exactly what was there."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ringfence.syscalls import errors
from support.fs_world import World, picture

NAMES = st.sampled_from(["a", "b", "ü", "d", "x y"])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map("/".join)
DATA = st.one_of(st.binary(max_size=20), st.sampled_from([b"", b"z" * 9_000, b"z" * 9_000 + b"y"]))

seed = st.one_of(
    st.tuples(st.just("file"), PATHS, DATA, st.sampled_from([0o600, 0o644, 0o755, 0o444])),
    st.tuples(st.just("directory"), PATHS, st.just(b""), st.sampled_from([0o755, 0o700, 0o555])),
    st.tuples(
        st.just("link"), PATHS, st.sampled_from([b"a", b"../d", b"/etc", b"gone", b"bad\xff"]), st.just(0)
    ),
)
call = st.one_of(
    st.tuples(st.just("fs.write"), st.fixed_dictionaries({"path": PATHS, "data": DATA})),
    st.tuples(st.just("fs.append"), st.fixed_dictionaries({"path": PATHS, "data": DATA})),
    st.tuples(st.just("fs.move"), st.fixed_dictionaries({"path": PATHS, "to": PATHS})),
    st.tuples(st.just("fs.delete"), st.fixed_dictionaries({"path": PATHS, "recursive": st.booleans()})),
)


def plant(root: Path, seeds) -> None:
    """Make a tree; what does not fit into it is left out."""
    bits = []
    for kind, name, data, mode in seeds:
        path = root / name
        if any(part.is_symlink() or part.is_file() for part in path.parents) or os.path.lexists(path):
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "link":
            path.symlink_to(os.fsdecode(data))
            continue
        path.write_bytes(data) if kind == "file" else path.mkdir()
        if len(data) % 2:
            os.setxattr(path, "user.odd", data[:20])
        bits.append((path, mode))
    for path, mode in bits:
        path.chmod(mode)
    for number, path in enumerate(sorted(root.rglob("*"))):
        os.utime(path, ns=(10**18 + number, 10**18 + number), follow_symlinks=False)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    seeds=st.lists(seed, max_size=10),
    calls=st.lists(call, min_size=1, max_size=10),
    cut=st.integers(min_value=0, max_value=10),
)
def test_any_calls_roll_back_to_any_step(seeds, calls, cut):
    with tempfile.TemporaryDirectory() as base:
        world = World(Path(base))
        plant(world.live, seeds)
        cut = min(cut, len(calls))
        pictures = []

        async def work():
            for action, arguments in calls:
                pictures.append(picture(world.live))
                try:
                    await world.run(action, **arguments)
                except errors.SyscallError:
                    # A refusal changes nothing, and takes its number all the same.
                    assert picture(world.live) == pictures[-1]
                    world.step = len(pictures)
                assert world.step == len(pictures)

        asyncio.run(work())
        pictures.append(picture(world.live))
        assert all(world.snapshots.verify(point) for point in world.snapshots.points())
        plan = world.undo(down_to=cut)
        assert plan.conflicts == ()
        assert picture(world.live) == pictures[cut]
        assert list(Path(base).glob(".tmp-live/*")) == []
        for path in world.live.rglob("*"):
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        world.close()
