"""Field cases of rule matching and of two doors to the same bytes, through a real kernel with real commands."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Denied, InvalidRequest, RingfenceError
from support.kernels import Refused, eventually
from support.scenes import Held, Scene, scene_of_its_own

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str) -> Iterator[Scene]:
    with scene_of_its_own(postgres_server, template_database) as scene:
        yield scene


def run(held: Held, argv: list[str], **more: Any) -> Any:
    """The command's result, or the error that refused it. A person approves whatever is asked: the wall must hold by itself."""
    worker = held.rf.thread(lambda: held.rf.exec.run(argv, **more))

    def over() -> bool:
        for waits in held.operator.ask("Approvals", agent=held.id)["approvals"]:
            held.operator.ask("Approve", id=waits["id"])
        return worker.done

    eventually(over, "the command does not end")
    try:
        return worker.result()
    except RingfenceError as error:
        return error


# -- C01, C02 ---------------------------------------------------------------------------------------------------------

DELETES = [
    ["rm", "a"],
    ["sh", "-c", "cd /workspace && rm a"],
    ["sh", "-c", "echo a | xargs rm"],
    ["find", ".", "-name", "a", "-exec", "rm", "{}", "+"],
    ["find", ".", "-name", "a", "-delete"],
    ["sh", "-c", "rm a"],
    ["sh", "-c", "X=1 rm a"],
    ["sh", "-c", "$(echo rm) a"],
    ["sh", "-c", "`echo rm` a"],
    ["/bin/rm", "a"],
    ["sh", "-c", "(rm a)"],
    ["sh", "-c", "rm\ta"],
    ["sh", "-c", "true\nrm a"],
    ["sh", "-c", "eval rm a"],
    ["env", "rm", "a"],
    ["sh", "-c", "r=rm; $r a"],
    ["sh", "-c", "unlink a"],
    ["sh", "-c", "mv a b"],
    [
        "sh",
        "-c",
        ": > b; exec 3< a; cat a > b; perl -e 'unlink \"a\"' || python3 -c 'import os; os.remove(\"a\")'",
    ],
    ["python3", "-c", "import os; os.remove('a')"],
    ["python3", "-c", "import shutil; shutil.rmtree('/workspace', ignore_errors=True)"],
]


@pytest.fixture(scope="module")
def kept(scene: Scene) -> Held:
    """May run anything but `rm`, write what it likes, delete nothing."""
    return scene.hold(
        allow=['exec.run: "*"', 'fs.read: "/workspace/**"', 'fs.write: "/workspace/**"'],
        deny=['exec.run: "rm *"'],
        files={"a": "keep me"},
    )


@pytest.mark.parametrize(
    "argv", DELETES, ids=lambda argv: " ".join(argv).encode("unicode_escape").decode()[:40]
)
def test_no_command_deletes_what_may_not_be_deleted(kept: Held, argv: list[str]) -> None:
    result = run(kept, argv)
    assert (kept.live / "a").read_text() == "keep me"
    step = kept.last()
    if isinstance(result, RingfenceError):
        assert isinstance(result, Denied), result
        assert step["verdict"] == "deny"
        assert step["outcome"] == "denied"
    else:
        # It ran and failed by itself: then nothing of it may count.
        assert "/workspace/a" not in result.changed


def test_a_compound_command_names_the_part_that_is_not_allowed(scene: Scene) -> None:
    held = scene.hold(
        allow=['exec.run: "cd *"', 'exec.run: "sh -c *"', 'fs.*: "/workspace/**"'],
        deny=['exec.run: "touch *"'],
    )
    denied = held.refused(
        Denied, lambda: held.rf.exec.run(["sh", "-c", "cd /workspace && touch /workspace/marker"])
    )
    assert "touch" in denied.message
    assert not (held.live / "marker").exists()
    row = held.operator.stream("Audit", agent=held.id)[-1]
    assert "touch" in row["body"]
    # And a rule for one word is no rule for a line that begins with it.
    held.refused(Denied, lambda: held.rf.exec.run(["cd /workspace && touch x"]))


# -- redirections: a second door to files -----------------------------------------------------------------------------

OPENS = [
    (["sh", "-c", "echo a >.env"], "deny", 'fs.*: "/workspace/.env"'),
    (["bash", "-c", "echo a 2>>./.env"], "deny", 'fs.*: "/workspace/.env"'),
    (["env", "X=1", "nice", "sh", "-c", "true; sh -c 'echo a &>/workspace/.env'"], "deny", "/workspace/.env"),
    (["sh", "-c", "cat <<E\n$(echo a >|.env)\nE"], "deny", "/workspace/.env"),
    (["sh", "-c", "exec 3<>.env"], "deny", "/workspace/.env"),
    (["sh", "-c", "cat <.env"], "deny", "/workspace/.env"),
    (["sh", "-c", "cd lead && echo a >.env"], "deny", "nothing allows fs.write on `/workspace/sub/.env`"),
    (["sh", "-c", "echo a >lost/b"], "deny", "nothing allows fs.write on `/workspace/lost/b`"),
    (["sh", "-c", "cat <asked"], "ask", 'fs.read: "/workspace/asked"'),
    (["sh", "-c", "cat <(ls)"], "ask", "are not followed"),
    (["sh", "-c", "echo a >$x"], "ask", "is not written out"),
    (["sh", "-c", "cat <a >out/b 2>/dev/null; cat <<E >>out/b\n>.env\nE"], "allow", 'exec.run: "*"'),
]


@pytest.fixture(scope="module")
def doors(scene: Scene) -> Held:
    """May run anything, write below `out`, and never touch `.env`."""
    held = scene.hold(
        allow=['exec.run: "*"', 'fs.read: "/workspace/**"', 'fs.write: "/workspace/out/**"'],
        ask=['fs.read: "/workspace/asked"'],
        deny=['fs.*: "/workspace/.env"'],
        files={"a": "a", "asked": "b", "sub/c": "c", "out/x": "x"},
    )
    (held.live / "lead").symlink_to("sub")
    return held


@pytest.mark.parametrize(("argv", "verdict", "said"), OPENS, ids=lambda v: str(v)[:40])
def test_a_redirection_is_judged_before_the_start_and_every_door_says_the_same(
    doors: Held, argv: list[str], verdict: str, said: str
) -> None:
    asked = doors.operator.ask("PolicyCanI", agent=doors.id, action="exec.run", resource=shlex.join(argv))
    assert (asked["verdict"], said in asked["reason"]) == (verdict, True), asked
    result = run(doors, argv)
    step = doors.last()
    told = doors.operator.ask("PolicyExplain", agent=doors.id, step=step["step"])
    assert step["verdict"] == told["verdict"] == verdict
    if verdict == "deny":
        assert isinstance(result, Denied)
        assert result.message == told["reason"] == asked["reason"]
        # Nothing was started: no sandbox, and no point.
        assert told["point"] is None
        assert not (doors.live / ".env").exists()
    else:
        assert not isinstance(result, RingfenceError), result


def test_who_is_asked_about_a_redirection_that_writes_sees_what_was_written(scene: Scene) -> None:
    held = scene.hold(allow=['exec.run: "*"'], ask=['fs.write: "/workspace/**"'], files={"a": "before\n"})
    argv = ["sh", "-c", "echo after >a"]
    can = held.operator.ask("PolicyCanI", agent=held.id, action="exec.run", resource=shlex.join(argv))
    assert can["verdict"] == "ask"
    worker = held.rf.thread(lambda: held.rf.exec.run(argv))

    def waiting() -> list[Any]:
        return held.operator.ask("Approvals", agent=held.id)["approvals"]

    eventually(lambda: bool(waiting()), "nobody is asked")
    (one,) = waiting()
    shown = held.operator.ask("ApprovalShow", id=one["id"])
    assert "-before" in json.dumps(shown)
    assert "+after" in json.dumps(shown)
    held.operator.ask("Approve", id=one["id"])
    assert worker.result().changed == ("/workspace/a",)
    assert (held.live / "a").read_text() == "after\n"
    assert waiting() == []


# -- C06 --------------------------------------------------------------------------------------------------------------


def test_search_runs_and_withholds_what_may_not_be_read(scene: Scene) -> None:
    held = scene.hold(
        allow=['fs.read: "/workspace/**"'],
        deny=['fs.read: "/workspace/.env"', 'fs.read: "/workspace/deep/**/key.pem"'],
        files={".env": "x secret", "a.txt": "x here", "deep/b.txt": "x there", "deep/er/key.pem": "x"},
    )
    found = held.rf.fs.search(text="x")
    assert [match.path for match in found] == ["/workspace/a.txt", "/workspace/deep/b.txt"]
    assert found.withheld == 2
    assert json.dumps([m.text for m in found]).count("secret") == 0
    listed = held.rf.fs.list()
    assert [entry.path for entry in listed] == ["/workspace/a.txt", "/workspace/deep"]
    assert listed.withheld == 1
    held.refused(Denied, lambda: held.rf.fs.stat(".env"))


# -- C08, C09 ---------------------------------------------------------------------------------------------------------


def test_a_sibling_that_shares_the_prefix_is_another_place(scene: Scene) -> None:
    held = scene.hold(
        allow=['fs.read: "/workspace/share/**"', 'fs.read: "/workspace/share"'],
        files={"share/a": "ok", "share-secret/a": "no", "shar": "no"},
    )
    assert held.rf.fs.read_text("share/a") == "ok"
    for path in ("share-secret/a", "shar", "share/../share-secret/a", "./share/../shar"):
        with pytest.raises((Denied, InvalidRequest)):
            held.rf.fs.read_text(path)


def test_one_star_is_one_segment(scene: Scene) -> None:
    held = scene.hold(
        allow=['fs.read: "/workspace/v1/*"'],
        files={"v1/items": "ok", "v1/admin/secrets": "no", "V1/items": "no", "v1/%2e%2e": "ok too"},
    )
    assert held.rf.fs.read_text("v1/items") == "ok"
    assert held.rf.fs.read_text("v1//items") == "ok"
    held.refused(Denied, lambda: held.rf.fs.read_text("v1/admin/secrets"))
    held.refused(Denied, lambda: held.rf.fs.read_text("V1/items"))
    # A path is no URL: nothing in it is decoded.
    assert held.rf.fs.read_text("v1/%2e%2e") == "ok too"


# -- C13, C18 ---------------------------------------------------------------------------------------------------------

READS = [
    ["cat", ".env"],
    ["sh", "-c", "cat /workspace/.env"],
    ["sh", "-c", "cat ./*env .e*"],
    ["sh", "-c", "cat /proc/self/cwd/.env /proc/self/root/workspace/.env"],
    ["python3", "-c", "print(open('.env').read())"],
    ["sh", "-c", "cp .env copy; cat copy"],
    ["sh", "-c", "ln .env hard; cat hard"],
    ["sh", "-c", "ln -s .env soft; cat soft"],
    ["sh", "-c", "tar cf - . | tr -d '\\0'"],
    ["grep", "-r", "canary", "."],
    ["sh", "-c", "cat sub/.env sub/deep/.env later/.env"],
]


@pytest.fixture(scope="module")
def masked(scene: Scene) -> Held:
    held = scene.hold(
        allow=['"*": "**"'],
        deny=[
            'fs.*: "**/.env"',
            'fs.read: "/workspace/secret.txt"',
            'fs.*: "/workspace/.ssh/**"',
            'fs.*: "/workspace/.ssh"',
        ],
        files={
            ".env": "canary-1",
            "sub/.env": "canary-2",
            "sub/deep/.env": "canary-3",
            "secret.txt": "canary-4",
            ".ssh/id": "canary-5",
            "a.txt": "seen",
        },
    )
    # Created later, by someone with more rights.
    (held.live / "later").mkdir()
    (held.live / "later" / ".env").write_text("canary-6")
    return held


@pytest.mark.parametrize("argv", READS, ids=lambda argv: " ".join(argv)[:40])
def test_a_file_that_may_not_be_read_shows_in_no_command(masked: Held, argv: list[str]) -> None:
    result = run(masked, argv)
    if not isinstance(result, RingfenceError):
        assert "canary" not in result.stdout + result.stderr
    for path in masked.live.rglob("*"):
        hidden = path.name in (".env", "secret.txt", "id")
        if path.is_file() and not path.is_symlink() and not hidden:
            assert b"canary" not in path.read_bytes(), path


def test_a_file_that_may_not_be_read_is_not_read_or_changed_by_any_call(masked: Held) -> None:
    rf = masked.rf
    for path in (".env", "sub/.env", "sub/deep/.env", "later/.env", ".ssh/id"):
        before = (masked.live / path).read_text()
        for call in (
            lambda path=path: rf.fs.read_text(path),
            lambda path=path: rf.fs.stat(path),
            lambda path=path: rf.fs.write_text(path, "x"),
            lambda path=path: rf.fs.append_text(path, "x"),
            lambda path=path: rf.fs.move(path, "moved"),
            lambda path=path: rf.fs.delete(path),
        ):
            masked.refused(Denied, call)
        run(masked, ["sh", "-c", f"echo x > {path}; rm -rf {path}"])
        assert (masked.live / path).read_text() == before
    masked.refused(Denied, lambda: rf.fs.read_text("secret.txt"))
    # Through a link, which is judged as what it leads to.
    rf.exec.run(["ln", "-sf", "sub/deep/.env", "lead"])
    masked.refused(Denied, lambda: rf.fs.read_text("lead"))
    masked.refused(Denied, lambda: rf.fs.write_text("lead", "x"))
    masked.refused(Denied, lambda: rf.fs.write_text("new/.env", "x"))
    # A tree that holds one is not removed with it, nor moved to where another rule counts.
    for call in (lambda: rf.fs.delete("sub", recursive=True), lambda: rf.fs.move("sub", "bus")):
        masked.refused(Denied, call)
    result = run(masked, ["rm", "-rf", "sub"])
    assert isinstance(result, Denied) or result.exit_code != 0
    assert (masked.live / "sub" / "deep" / ".env").read_text() == "canary-3"


def test_the_program_image_lacks_what_the_program_may_not_read(scene: Scene) -> None:
    program = """
import json, os, subprocess
found = [os.path.join(d, f) for d, _, names in os.walk(".") for f in names]
print(json.dumps(sorted(found)))
print(json.dumps(subprocess.run("cat .env sub/.env secret.txt; ls -a / /workspace", shell=True, capture_output=True, text=True).stdout))
"""
    agent = scene.run(
        program,
        allow=['fs.read: "/workspace/**"'],
        deny=['fs.*: "**/.env"', 'fs.read: "/workspace/secret.txt"'],
        files={".env": "canary", "sub/.env": "canary", "secret.txt": "canary", "sub/ok": "ok"},
    )
    found, seen = scene.said(agent)
    assert found == ["./agent.py", "./sub/ok"]
    assert "canary" not in seen


def test_a_rule_that_the_sandbox_cannot_enforce_stops_the_start(scene: Scene) -> None:
    manifest = """
apiVersion: ringfence/v1
kind: Agent
metadata: {name: later}
spec:
  run: {command: ["true"]}
  permissions: {allow: [fs.read: "/workspace/**"]}
  serve: {port: 80}
"""
    with pytest.raises(Refused) as refused:
        scene.operator.submit(manifest, {})
    assert refused.value.exit_code == 2
    assert str(refused.value).startswith("test.yaml:8:")
    assert [row for row in scene.operator.ask("List", all=True)["agents"] if row["name"] == "later"] == []
