"""The bodies of fs.*, on real files, a real store and a real policy."""

from __future__ import annotations

import asyncio
import os

import msgspec
import pytest
from ringfence.syscalls import errors, fs_common
from support.fs_world import ALLOW_ALL, picture


async def test_write_read_append_stat_list_move_delete(world):
    wrote = await world.run("fs.write", path="out/report.md", data=b"hello")
    assert wrote.size_bytes == 5
    read = await world.run("fs.read", path="/workspace/out/report.md")
    assert (read.data, read.size_bytes, read.version) == (b"hello", 5, wrote.version)
    assert (await world.run("fs.append", path="out/report.md", data=b"!")).size_bytes == 6
    assert (await world.run("fs.read", path="out/report.md", offset=4, limit=10)).data == b"o!"
    stat = (await world.run("fs.stat", path="out")).info
    assert (stat.path, stat.kind, stat.mode) == ("/workspace/out", "directory", 0o755)
    assert stat.modified_at.endswith("Z")
    assert [entry.path for entry in (await world.run("fs.list")).entries] == ["/workspace/out"]
    assert (await world.run("fs.move", path="out", to="in/deep")).path == "/workspace/in/deep"
    assert (await world.run("fs.delete", path="in", recursive=True)).removed == 3
    assert list(world.live.iterdir()) == []


async def test_results_are_json_whatever_the_disk_holds(world):
    (world.live / os.fsdecode(b"\xff")).write_text("x")
    (world.live / "l").symlink_to(os.fsdecode(b"to\xff"))
    (world.live / "old").write_text("x")
    os.utime(world.live / "old", ns=(-(10**18), -(10**18)))
    listed = await world.run("fs.list")
    assert [entry.path for entry in listed.entries] == ["/workspace/l", "/workspace/old"]
    assert listed.withheld == 1
    msgspec.json.encode(listed)
    msgspec.json.encode(await world.run("fs.search", glob="**"))


async def test_large_files_come_whole(world):
    data = os.urandom(3_000_000)
    (world.live / "big").write_bytes(data)
    assert (await world.run("fs.read", path="big")).data == data


async def test_what_may_not_be_seen_is_left_out_and_counted(make_world):
    world = make_world(deny=['fs.*: "/workspace/.env"', 'fs.read: "/workspace/secret/**"'])
    (world.live / ".env").write_text("TOKEN=canary")
    (world.live / "secret").mkdir()
    (world.live / "secret/s").write_text("canary")
    (world.live / "open").write_text("canary")
    found = await world.run("fs.search", text="canary")
    assert [match.path for match in found.matches] == ["/workspace/open"]
    assert found.withheld == 2
    listed = await world.run("fs.list")
    assert [entry.path for entry in listed.entries] == ["/workspace/open"]
    assert listed.withheld == 2


async def test_only_the_files_a_rule_allows_are_found(make_world):
    world = make_world(allow=['fs.search: "/workspace"', 'fs.read: "/workspace/src/*.py"'])
    (world.live / "src").mkdir()
    (world.live / "src/a.py").write_text("x")
    (world.live / "src/b.txt").write_text("x")
    found = await world.run("fs.search", path="/workspace", text="x")
    assert ([match.path for match in found.matches], found.withheld) == (["/workspace/src/a.py"], 1)


async def test_a_link_is_judged_by_what_it_names(make_world):
    world = make_world(deny=['fs.*: "/workspace/.env"'])
    (world.live / ".env").write_text("canary")
    (world.live / "innocent").symlink_to(".env")
    for action, more in (("fs.read", {}), ("fs.write", {"data": b"x"}), ("fs.append", {"data": b"x"})):
        with pytest.raises(errors.Denied):
            await world.run(action, path="innocent", **more)
    # The link itself is another file, which may go.
    assert (await world.run("fs.delete", path="innocent")).removed == 1
    assert (world.live / ".env").read_text() == "canary"


async def test_one_denied_path_beneath_keeps_the_whole_directory(make_world):
    world = make_world(deny=['fs.*: "**/.env"'])
    (world.live / "d/deep").mkdir(parents=True)
    (world.live / "d/deep/.env").write_text("canary")
    (world.live / "d/a").write_text("x")
    before = picture(world.live)
    for action, more in (("fs.delete", {"recursive": True}), ("fs.move", {"to": "e"})):
        with pytest.raises(errors.Denied, match=r"\.env"):
            await world.run(action, path="d", **more)
    assert picture(world.live) == before
    assert world.snapshots.points() == []


async def test_a_file_that_may_not_be_read_is_not_moved_to_where_it_may(make_world):
    world = make_world(deny=['fs.read: "/workspace/key"'])
    (world.live / "key").write_text("canary")
    with pytest.raises(errors.Denied):
        await world.run("fs.move", path="key", to="elsewhere")


async def test_a_denied_target_beneath_refuses_the_move(make_world):
    world = make_world(deny=['fs.write: "/workspace/etc/passwd"'])
    (world.live / "d").mkdir()
    (world.live / "d/passwd").write_text("x")
    with pytest.raises(errors.Denied, match="passwd"):
        await world.run("fs.move", path="d", to="etc")


@pytest.mark.parametrize("action", ["fs.delete", "fs.move"])
async def test_what_comes_between_the_plan_and_the_lock_is_judged_too(make_world, action):
    world = make_world(deny=['fs.*: "**/.env"'])
    (world.live / "d").mkdir()
    more = {"recursive": True} if action == "fs.delete" else {"to": "e"}
    body, given, call = world.call(action, path="d", **more)
    await call.require(call.plan.questions)
    (world.live / "d/.env").write_text("came later")
    with pytest.raises(errors.Denied):
        await body.run(call, given)
    assert (world.live / "d/.env").exists()
    assert world.snapshots.points() == []


@pytest.mark.parametrize("action", ["fs.delete", "fs.move"])
async def test_more_than_a_plan_asks_about_is_asked_under_the_lock(make_world, monkeypatch, action):
    monkeypatch.setattr(fs_common, "FIRST_QUESTIONS", 5)
    world = make_world(deny=['fs.*: "/workspace/d/z"'])
    (world.live / "d").mkdir()
    for name in ("a", "b", "c", "d", "e", "f", "z"):
        (world.live / "d" / name).write_text("x")
    more = {"recursive": True} if action == "fs.delete" else {"to": "e"}
    body, given, call = world.call(action, path="d", **more)
    await call.require(call.plan.questions)
    with pytest.raises(errors.Denied, match="/workspace/d/z"):
        await body.run(call, given)
    assert len(list((world.live / "d").iterdir())) == 7


@pytest.mark.parametrize(
    ("action", "arguments", "expected"),
    [
        ("fs.read", {"path": ""}, errors.InvalidRequest),
        ("fs.read", {"path": "/etc/passwd"}, errors.InvalidRequest),
        ("fs.read", {"path": "none"}, errors.NoSuchResource),
        ("fs.read", {"path": "d"}, errors.InvalidRequest),
        ("fs.read", {"path": "f", "offset": -1}, errors.InvalidRequest),
        ("fs.list", {"path": "f"}, errors.InvalidRequest),
        ("fs.list", {"path": "none"}, errors.NoSuchResource),
        ("fs.stat", {"path": "none"}, errors.NoSuchResource),
        ("fs.search", {"path": "f"}, errors.InvalidRequest),
        ("fs.search", {"path": "none"}, errors.NoSuchResource),
        ("fs.search", {"text": "a\nb"}, errors.InvalidRequest),
        ("fs.search", {"limit": -1}, errors.InvalidRequest),
        ("fs.write", {"path": "d", "data": b"x"}, errors.InvalidRequest),
        ("fs.write", {"path": "f/x", "data": b"x"}, errors.NoSuchResource),
        ("fs.write", {"path": "x", "mode": 0o4755}, errors.InvalidRequest),
        ("fs.write", {"path": "x", "mode": -1}, errors.InvalidRequest),
        ("fs.append", {"path": "d", "data": b"x"}, errors.InvalidRequest),
        ("fs.move", {"path": "none", "to": "x"}, errors.NoSuchResource),
        ("fs.move", {"path": "f", "to": "d"}, errors.Conflict),
        ("fs.move", {"path": "f", "to": "f"}, errors.InvalidRequest),
        ("fs.move", {"path": "d", "to": "d/x"}, errors.InvalidRequest),
        ("fs.move", {"path": "/workspace", "to": "x"}, errors.InvalidRequest),
        ("fs.delete", {"path": "d"}, errors.InvalidRequest),
        ("fs.delete", {"path": "none"}, errors.NoSuchResource),
        ("fs.delete", {"path": "/workspace", "recursive": True}, errors.InvalidRequest),
    ],
)
async def test_errors_are_typed_one_line_and_change_nothing(world, action, arguments, expected):
    (world.live / "d").mkdir()
    (world.live / "d/x").write_text("x")
    (world.live / "f").write_text("x")
    before = picture(world.live)
    with pytest.raises(expected) as caught:
        await world.run(action, **arguments)
    assert type(caught.value) is expected
    assert "\n" not in caught.value.message
    assert caught.value.message[0].islower() or caught.value.message[0] == "`"
    assert picture(world.live) == before


@pytest.mark.parametrize(
    ("action", "arguments"),
    [
        ("fs.write", {"path": "a/b/f", "data": b"x"}),
        ("fs.append", {"path": "f", "data": b"x"}),
        ("fs.move", {"path": "f", "to": "new/f"}),
        ("fs.delete", {"path": "d", "recursive": True}),
    ],
)
class TestChanges:
    @pytest.fixture
    def world(self, make_world):
        world = make_world()
        (world.live / "d/e").mkdir(parents=True)
        (world.live / "d/x").write_text("x")
        (world.live / "f").write_text("f")
        return world

    async def test_the_point_is_there_before_the_effect(self, world, action, arguments):
        body, given, call = world.call(action, **arguments)
        before = picture(world.live)
        seen = {}

        def look():
            seen["picture"] = picture(world.live)
            seen["verified"] = world.snapshots.verify(f"p{call.step}")

        call.hooks["check_live"] = look
        await body.run(call, given)
        assert seen == {"picture": before, "verified": True}
        assert call.reached == ["before_effect", "check_live", "after_effect"]
        [(covers, kind, _)] = call.points
        assert kind == "workspace"
        assert all(path.startswith("/workspace/") for path in covers)
        point = world.snapshots.load(f"p{call.step}")
        assert {path: world.workspace.fingerprint(path) for path in point.expect} == dict(point.expect)

    async def test_a_rollback_brings_all_back(self, world, action, arguments):
        before = picture(world.live)
        await world.run(action, **arguments)
        assert picture(world.live) != before
        plan = world.undo()
        assert plan.conflicts == ()
        assert picture(world.live) == before

    async def test_a_right_that_is_gone_at_the_last_moment_stops_it(self, world, action, arguments):
        def revoked():
            raise errors.Revoked("revoked")

        before = picture(world.live)
        body, given, call = world.call(action, **arguments)
        call.hooks["check_live"] = revoked
        with pytest.raises(errors.Revoked):
            await body.run(call, given)
        assert picture(world.live) == before
        assert not world.env.lock().locked()
        assert world.undo().items == ()

    async def test_no_point_no_effect(self, world, action, arguments):
        before = picture(world.live)
        body, given, call = world.call(action, **arguments)
        world.points.write_text("in the way")
        with pytest.raises(errors.SnapshotFailed) as caught:
            await body.run(call, given)
        assert "nothing was changed" in caught.value.message
        assert call.points == []
        assert picture(world.live) == before

    async def test_it_waits_for_the_lock(self, world, action, arguments):
        before = picture(world.live)
        body, given, call = world.call(action, **arguments)
        async with world.env.lock():
            task = asyncio.ensure_future(body.run(call, given))
            for _ in range(20):
                await asyncio.sleep(0)
            assert picture(world.live) == before
            assert call.reached == []
        await task

    async def test_a_cancelled_effect_that_happened_is_reported_as_done(self, world, action, arguments):
        body, given, call = world.call(action, **arguments)
        task = asyncio.ensure_future(body.run(call, given))
        # Cancelled from inside the last step before the effect: the thread that does it starts all the same.
        call.hooks["check_live"] = lambda: asyncio.get_running_loop().call_soon(task.cancel)
        result = await task
        assert isinstance(result, body.Result)
        point = world.snapshots.load(f"p{call.step}")
        assert all(world.workspace.fingerprint(path) == after for path, after in point.expect.items())


async def test_links_swapped_while_waiting_for_the_lock(make_world):
    world = make_world(allow=ALLOW_ALL)
    for name in ("one", "two"):
        (world.live / name).mkdir()
    (world.live / "via").symlink_to("one")
    body, given, call = world.call("fs.write", path="via/f", data=b"x")
    assert call.plan.resource == "/workspace/one/f"
    (world.live / "via").unlink()
    (world.live / "via").symlink_to("two")
    with pytest.raises(errors.Conflict, match="call again"):
        await body.run(call, given)
    assert list((world.live / "two").iterdir()) == list((world.live / "one").iterdir()) == []
