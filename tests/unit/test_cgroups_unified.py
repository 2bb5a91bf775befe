"""Control groups of version 2, against a model of Linux' rules: where the machine that tests has version 1 only."""

from __future__ import annotations

from pathlib import Path

import pytest
from ringfence.sandbox.native import unified
from ringfence.sandbox.native.cgroups import Groups
from support.unified_model import Model

ALL = ["memory", "pids", "cpu", "freezer"]
KERNEL, WARDEN, POSTGRES, SHELL = 100, 101, 102, 50
OURS = {KERNEL, WARDEN, POSTGRES}.__contains__


@pytest.fixture
def top(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def made(model: Model, own: str, name: str = "mark-one") -> tuple[Path, list[str]]:
    directory, has = unified.make(model, str(model.top), own, name, ALL, OURS)
    return Path(directory) if directory else model.top / "none", has


def start(model: Model, directory: Path, pid: int = 200) -> None:
    """Fork a process of the warden's and move it in, as each sandbox does."""
    model.where[pid] = model.where[WARDEN]
    model.write(f"{directory}/cgroup.procs", pid)
    assert model.where[pid] == directory


@pytest.mark.parametrize("root", [True, False])
def test_a_unit_with_delegation_moves_the_kernel_into_a_leaf(top: Path, root: bool) -> None:
    model = Model(top, root=root)
    model.gives("cpu memory pids")
    model.group("system.slice", gives="cpu memory pids")
    unit = model.group("system.slice/ringfence.service", delegated=True, pids=(KERNEL, WARDEN, POSTGRES))
    own = "/system.slice/ringfence.service"
    directory, has = made(model, own)
    assert directory == unit / "ringfence" / "mark-one"
    assert has == ALL
    assert model.inside(unit) == []
    assert set(model.inside(unit / unified.LEAF)) == {KERNEL, WARDEN, POSTGRES}
    start(model, directory)
    # The next one is made from the leaf, and in the same place.
    second, has = made(model, f"{own}/{unified.LEAF}", "mark-two")
    assert (second, has) == (unit / "ringfence" / "mark-two", ALL)
    assert not (unit / unified.LEAF / unified.LEAF).exists()
    start(model, second, 201)


def test_below_a_users_manager_the_nearest_slice_that_is_free_is_taken(top: Path) -> None:
    model = Model(top)
    model.gives("cpu memory pids")
    model.group("user.slice", gives="memory pids")
    model.group("user.slice/user-1000.slice", gives="memory pids")
    manager = model.group("user.slice/user-1000.slice/user@1000.service", gives="memory pids", delegated=True)
    slice_ = model.group(
        "user.slice/user-1000.slice/user@1000.service/app.slice", gives="memory", delegated=True
    )
    scope = model.group(
        "user.slice/user-1000.slice/user@1000.service/app.slice/terminal.scope",
        delegated=True,
        pids=(SHELL, KERNEL, WARDEN),
    )
    directory, has = made(model, f"/{scope.relative_to(top)}")
    # Someone else's shell is in the scope: nothing is moved. The slice hands `pids` on from now on, and has no `cpu`.
    assert directory == slice_ / "ringfence" / "mark-one"
    assert has == ["memory", "pids", "freezer"]
    assert set(model.inside(scope)) == {SHELL, KERNEL, WARDEN}
    assert manager.exists()
    start(model, directory)


def test_a_session_that_nothing_was_delegated_to_has_none(top: Path) -> None:
    model = Model(top)
    model.gives("memory pids")
    model.group("user.slice", gives="memory pids")
    model.group("user.slice/user-1000.slice", gives="memory pids")
    model.group("user.slice/user-1000.slice/user@1000.service", delegated=True)
    scope = model.group("user.slice/user-1000.slice/session-3.scope", pids=(SHELL, KERNEL, WARDEN))
    before = sorted(path for path in top.rglob("*"))
    assert made(model, f"/{scope.relative_to(top)}")[1] == []
    assert sorted(path for path in top.rglob("*")) == before


def test_root_in_a_session_takes_the_top(top: Path) -> None:
    model = Model(top, root=True)
    model.gives("memory pids")
    model.group("user.slice", gives="memory pids")
    scope = model.group("user.slice/session-1.scope", pids=(SHELL, KERNEL, WARDEN))
    model.where[1] = top
    directory, has = made(model, f"/{scope.relative_to(top)}")
    # `user.slice` gives no `cpu`; the top of all may hand it out although processes are in it.
    assert (directory, has) == (top / "ringfence" / "mark-one", ALL)
    assert set(model.inside(scope)) == {SHELL, KERNEL, WARDEN}
    assert model.where[1] == top
    start(model, directory)


def test_the_nearest_of_equals_is_taken_so_that_limits_around_the_kernel_hold(top: Path) -> None:
    model = Model(top, root=True)
    model.gives("cpu memory pids")
    model.group("outer", gives="cpu memory pids")
    model.group("outer/box", pids=(KERNEL, WARDEN))
    assert made(model, "/outer/box")[0] == top / "outer" / "box" / "ringfence" / "mark-one"


@pytest.mark.parametrize("foreign", [False, True])
def test_the_top_of_a_container_is_no_real_top(top: Path, foreign: bool) -> None:
    model = Model(top, root=True, real_top=False)
    model.where |= dict.fromkeys((KERNEL, WARDEN), top)
    if foreign:
        model.where[SHELL] = top
    directory, has = made(model, "/")
    assert directory == top / "ringfence" / "mark-one"
    assert has == (["freezer"] if foreign else ALL)
    assert set(model.inside(top)) == ({KERNEL, WARDEN, SHELL} if foreign else set())


def test_a_group_outside_of_what_is_shown_is_not_looked_for(top: Path) -> None:
    model = Model(top, root=True)
    assert list(unified.parents("/m", "/../../other")) == ["/m"]
    assert list(unified.parents("/m", "/")) == ["/m"]
    assert list(unified.parents("/m", f"/a/{unified.LEAF}")) == ["/m/a", "/m"]
    model.where[WARDEN] = top
    assert made(model, "/../../other")[1] == ALL


def test_a_controller_that_can_not_be_handed_out_takes_no_other_along(top: Path) -> None:
    model = Model(top, root=True)
    model.refused = {"cpu"}
    model.group("unit", pids=(KERNEL,))
    assert made(model, "/unit")[1] == ["memory", "pids", "freezer"]


def test_without_any_controller_there_is_still_the_freezer(top: Path) -> None:
    model = Model(top, root=True)
    (top / "cgroup.controllers").write_text("")
    directory, has = made(model, "/")
    assert has == ["freezer"]
    unified.discard(model, str(top), "mark-one")
    assert not (top / "ringfence").exists()
    assert not directory.exists()


def test_a_shared_group_that_others_are_in_stays(top: Path) -> None:
    model = Model(top, root=True)
    made(model, "/", "mark-one")
    made(model, "/", "other-two")
    unified.discard(model, str(top), "mark-one")
    assert [path.name for path in (top / "ringfence").iterdir() if path.is_dir()] == ["other-two"]


FILES = (
    "memory.max",
    "memory.swap.max",
    "memory.oom.group",
    "pids.max",
    "cpu.max",
    "cgroup.kill",
    "cgroup.freeze",
)


@pytest.fixture
def groups(tmp_path: Path) -> Groups:
    for name in FILES:
        (tmp_path / name).touch()
    return Groups({controller: (str(tmp_path), 2) for controller in ALL})


def test_limits_of_version_2(groups: Groups, tmp_path: Path) -> None:
    groups.limit(64 << 20, 9, 0.5)
    found = {name: (tmp_path / name).read_text() for name in FILES}
    assert found["memory.max"] == str(64 << 20)
    assert found["memory.swap.max"] == "0"
    assert found["memory.oom.group"] == "1"
    assert found["pids.max"] == "9"
    assert found["cpu.max"] == "50000 100000"
    assert set(groups.where) == set(ALL)


def test_a_limit_that_can_not_be_set_is_not_claimed(groups: Groups, tmp_path: Path) -> None:
    (tmp_path / "memory.max").unlink()
    (tmp_path / "memory.swap.max").unlink()
    groups.limit(64 << 20, 9, 0.5)
    assert set(groups.where) == {"pids", "cpu", "freezer"}
    assert (tmp_path / "pids.max").read_text() == "9"


def test_kills_for_want_of_memory_are_counted(groups: Groups, tmp_path: Path) -> None:
    assert groups.oom_kills() == 0
    (tmp_path / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 3\noom_group_kill 1\n")
    assert groups.oom_kills() == 3


def test_the_whole_group_is_killed_by_one_write(groups: Groups, tmp_path: Path) -> None:
    groups.kill()
    assert (tmp_path / "cgroup.kill").read_text() == "1"
