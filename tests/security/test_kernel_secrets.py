"""Secrets of the operator and of the kernel's surroundings show nowhere: not inside, not in the evidence, not on disk."""

from __future__ import annotations

import base64
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import psycopg
import pytest
from ringfence.agent import CallFailed, Denied, NoSuchResource
from ringfence.kernel.postgres import EmbeddedPostgres
from support.kernels import eventually
from support.scenes import Scene, console, scene_on
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CANARY = "canary-3f9a1c"
TOKEN = "tok/en+va=lue-7b2d"  # with characters that encodings change
LOGGED = "log/ged+key=71aa90"  # one that somebody wrote into a table
PASSWORD = "pass-word-5e1c90"

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    api: {{type: http, base: "{base}", auth: {{bearer: {{secret: api-token}}}}}}
    open: {{type: http, base: "{base}/open"}}
    keyed: {{type: http, base: "{base}/keyed", auth: {{header: {{name: X-Key, value: {{secret: logged}}}}}}}}
    house: {{type: postgres, embedded: true}}
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("target") / "journal")
    yield made
    made.close()


@pytest.fixture(scope="module")
def scene(target: Target) -> Iterator[Scene]:
    """The embedded database, so that everything the kernel writes lies below one directory."""
    env = {
        "DB_URL": CANARY,
        "LLM_KEY": CANARY,
        "PGPASSWORD": CANARY,
        "AWS_SECRET_ACCESS_KEY": CANARY,
        "HOME": "/" + CANARY,
    }
    with scene_on(None, env=env) as scene:
        scene.operator.ask("SecretSet", name="api-token", value=TOKEN.encode())
        scene.operator.ask("SecretSet", name="logged", value=LOGGED.encode())
        scene.kernel.config.write_text(CONFIG.format(base=target.base))
        scene.operator.ask("Reload")
        yield scene


def everything(scene: Scene) -> list[tuple[str, bytes]]:
    """Every file below the data directory but those of the secret store, and the kernel's own output."""
    data = scene.kernel.data
    found = [
        p
        for p in data.rglob("*")
        if p.is_file() and not p.is_symlink() and p.relative_to(data).parts[0] != "secrets"
    ]
    return [
        ("the kernel's log", scene.kernel.log.read_bytes()),
        *((str(path), path.read_bytes()) for path in found),
    ]


def test_the_kernels_environment_is_seen_by_no_program(scene: Scene) -> None:
    program = """
import json, os, pathlib
seen = {"environ": dict(os.environ)}
for path in sorted(pathlib.Path("/proc").glob("[0-9]*/environ")) + sorted(pathlib.Path("/proc").glob("[0-9]*/cmdline")):
    try:
        seen[str(path)] = path.read_bytes().decode("utf-8", "replace")
    except OSError as error:
        seen[str(path)] = error.strerror
from ringfence import agent
with agent.boot() as rf:
    seen["command"] = rf.exec.run(["sh", "-c", "env; cat /proc/*/environ"]).stdout
    try:
        rf.fs.read_text("/proc/self/environ")
    except agent.RingfenceError as error:
        seen["fs"] = error.reason
print(json.dumps(seen))
"""
    agent = scene.run(program, allow=['exec.run: "*"', 'fs.*: "/workspace/**"'])
    (seen,) = scene.said(agent)
    assert CANARY not in json.dumps(seen)
    assert seen["fs"] == "InvalidRequest"
    assert set(seen["environ"]) <= {
        "PATH", "HOME", "LANG", "LC_CTYPE", "PWD", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED",
        "RINGFENCE_SOCKET", "RINGFENCE_TOKEN", "RINGFENCE_AGENT", "TMPDIR", "PYTHONPATH",
    }  # fmt: skip
    # A command has no door of its own.
    assert "RINGFENCE_TOKEN" not in seen["command"]
    assert not any("ringfence.console" in str(value) for value in seen.values())


def test_a_credential_is_added_outside_and_taken_out_of_answers(scene: Scene, target: Target) -> None:
    held = scene.hold(allow=[f'http.*: "{target.base}/**"'])
    response = held.rf.http.get(f"{target.base}/see/echo")
    (delivery,) = target.deliveries("/see/echo")
    assert delivery["headers"]["authorization"] == f"Bearer {TOKEN}"
    assert TOKEN not in response.text
    assert TOKEN not in json.dumps(dict(response.headers))
    assert "[redacted]" in response.text
    assert json.loads(response.text)["token"] == "[redacted]"


def test_a_credential_comes_back_by_no_way_round(scene: Scene, target: Target) -> None:
    """Torn into chunks and codes, out of another resource, out of a database and its errors."""
    held = scene.hold(
        allow=[f'http.*: "{target.base}/**"', "sql.read: {database: house}", "sql.write: {database: house}"]
    )
    rf = held.rf
    body = rf.http.get(f"{target.base}/way/torn").text.split("\n")
    assert body == ["[redacted]", "d[redacted]", "[redacted]"]  # the `d` is of what stood before it
    # This one has no credential, and shows what the other one was sent.
    page = rf.http.get(f"{target.base}/open/seen").text
    assert "Bearer [redacted]" in page
    # A database in which somebody keeps requests.
    with psycopg.connect(
        EmbeddedPostgres(scene.kernel.data).dsn("house", "house"), autocommit=True
    ) as connection:
        connection.execute("create table log (id int primary key, line text)")
        connection.execute("insert into log values (1, %s)", [f"Key {LOGGED}"])
    assert rf.sql.query("house", "select line from log")[0]["line"] == "Key [redacted]"
    coded = "select encode(('x' || line)::bytea, 'base64') as line from log"
    assert "[redacted]" in rf.sql.query("house", coded)[0]["line"]
    error = held.refused(CallFailed, lambda: rf.sql.query("house", "select line::int from log"))
    assert "[redacted]" in str(error)
    padded = "select (repeat('x', 470) || line)::int from log"
    error = held.refused(CallFailed, lambda: rf.sql.query("house", padded))
    assert LOGGED[:4] not in str(error)
    changed = rf.sql.execute("house", "update log set line = line where id = 1 returning line")
    assert LOGGED not in repr(changed)
    for secret in (TOKEN, LOGGED):
        rows = scene.sql(
            "select count(*) from journal where position(%s::bytea in body) > 0", secret.encode()
        )
        assert rows == [(0,)]


SPELLER = r"""
import base64, sys, urllib.parse
secret = sys.argv[1][::-1]
raw, pieces = secret.encode(), int(sys.argv[2])
spelled = [
    secret, secret.upper(), urllib.parse.quote(secret, safe=""), urllib.parse.quote_plus(secret).lower(),
    base64.b64encode(raw).decode(), base64.urlsafe_b64encode(b"ab" + raw + b"c").decode(), raw.hex(), raw.hex(":").upper(),
    "".join(f"%{b:02X}" for b in raw), "".join(f"\\u{b:04x}" for b in raw), repr(raw),
    "\n".join(base64.b64encode(raw).decode()),
]
for stream in (sys.stdout, sys.stderr):
    for text in spelled:
        text = f"<{text}>\n"
        for at in range(0, len(text), pieces):
            stream.write(text[at : at + pieces])
            stream.flush()
sys.stdout.write("." * (int(sys.argv[3]) - 3) + spelled[0] + "." * int(sys.argv[3]))
if sys.argv[4:]:
    import os
    os.makedirs("out", exist_ok=True)
    open("out/a", "w").write("one\n" + secret + "\n" + spelled[-1] + "\ntwo\n")
"""
"""Says a secret that it is given backwards: in every spelling, piece by piece, across a window's end, and in a file."""


def parts_of(secret: str) -> list[str]:
    """What must be seen of it nowhere."""
    raw = secret.encode()
    return [secret, secret.upper(), raw.hex(), base64.b64encode(raw).decode()[:-4], quote(secret, safe="")]


def test_what_a_command_prints_gives_no_credential_away(scene: Scene) -> None:
    """Its output whole, the artifact of a long one, and what a person is shown of its changes."""
    held = scene.hold(
        allow=['exec.run: "*"', 'artifacts.get: "**"'],
        ask=['fs.write: "/workspace/out/**"'],
        files={"spell.py": SPELLER},
    )
    for size in (64, 1 << 20):
        argv = ["python3", "spell.py", TOKEN[::-1], "3", str(size)]
        done = held.rf.exec.run(argv)
        assert done.exit_code == 0, done.stderr
        kept = b"" if size == 64 else held.rf.artifacts.get(done.stdout_ref)
        assert bool(done.stdout_ref) is (size > 64)
        for shown in (done.stdout, done.stderr, kept.decode()):
            assert [part for part in parts_of(TOKEN) if part in shown] == []
        assert done.stderr.count("[redacted]") == 12
        assert (kept.decode() or done.stdout).count("[redacted]") == 13
        assert ".[redacted]." in (kept.decode() or done.stdout)
    making = held.rf.thread(lambda: held.rf.exec.run([*argv[:4], "64", "write"]))
    eventually(lambda: scene.operator.ask("Approvals")["approvals"], "nobody is asked")
    (asked,) = scene.operator.ask("Approvals")["approvals"]
    shown = json.dumps(scene.operator.ask("ApprovalShow", id=asked["id"]))
    assert "[redacted]" in shown
    assert [part for part in parts_of(TOKEN) if part in shown] == []
    scene.operator.ask("Deny", id=asked["id"], reason="seen")
    held.refused(Denied, making.result)


@pytest.mark.parametrize(
    ("declared", "value"),
    [
        ("{{type: postgres, dsn: {{secret: odd}}}}", f"{PASSWORD} host=db"),
        ("{{type: postgres, dsn: {{secret: odd}}}}", f"postgresql://app:{PASSWORD}%zz@db/x"),
        ('{{type: http, base: "{base}/odd", auth: {{bearer: {{secret: odd}}}}}}', f"{PASSWORD}\nsecond"),
        ('{{type: http, base: "{base}/odd", auth: {{bearer: {{secret: odd}}}}}}', f"{PASSWORD}é"),
    ],
)
def test_a_credential_that_can_not_be_used_is_quoted_nowhere(
    scene: Scene, target: Target, declared: str, value: str
) -> None:
    before = scene.kernel.config.read_text()
    scene.operator.ask("SecretSet", name="odd", value=value.encode())
    scene.kernel.config.write_text(before + f"    odd: {declared.format(base=target.base)}\n")
    (odd,) = scene.operator.ask("Reload")["unavailable"]
    assert "secret `odd`" in odd["reason"]
    held = scene.hold(allow=[f'http.*: "{target.base}/**"', "sql.read: {database: odd}"])
    calls = (
        lambda: held.rf.http.get(f"{target.base}/odd/echo"),
        lambda: held.rf.sql.query("odd", "select 1"),
    )
    error = held.refused(NoSuchResource, calls["postgres" in declared])
    scene.kernel.config.write_text(before)
    assert scene.operator.ask("Reload")["unavailable"] == []
    scene.operator.ask("SecretRemove", name="odd")
    shown = json.dumps([str(error), odd]).encode() + scene.kernel.log.read_bytes()
    assert PASSWORD.encode() not in shown


def test_a_secret_is_listed_by_name_alone(scene: Scene) -> None:
    assert scene.operator.ask("SecretList") == {"secrets": ["api-token", "logged"]}
    store = scene.kernel.data / "secrets"
    paths = [store, *store.rglob("*")] if store.is_dir() else [store]
    assert all(path.stat().st_mode & 0o077 == 0 for path in paths)
    shown = console("secrets", "ls", "--data", str(scene.kernel.data), "--json")
    assert shown.returncode == 0
    assert TOKEN not in shown.stdout


def test_nothing_that_is_kept_holds_a_secret(scene: Scene, target: Target) -> None:
    """By now the journal, logs, points, artifacts and the database hold all that happened."""
    held = scene.hold(allow=['"*": "**"'], files={"a.txt": "a"})
    held.rf.fs.write_text("a.txt", "b")
    held.rf.checkpoint.save({"at": 1})
    held.rf.http.post(f"{target.base}/kept/echo", json={"x": 1})
    held.rf.exec.run(["env"])
    export = scene.kernel.data.parent / "audit.jsonl"
    done = console("audit", "--data", str(scene.kernel.data), "--export", str(export))
    assert done.returncode == 0, done.stderr
    scene.sql("checkpoint")
    files = [*everything(scene), ("the export", export.read_bytes())]
    assert len(files) > 20
    assert any(b"kept/echo" in data for _, data in files)  # the search finds what is there
    for name, data in files:
        assert CANARY.encode() not in data, name
        assert TOKEN.encode() not in data, name
        assert PASSWORD.encode() not in data, name
    dump = scene.sql("select string_agg(encode(body, 'escape'), '') from journal")[0][0]
    assert TOKEN not in dump
    assert CANARY not in dump


def test_a_removed_secret_is_missed_by_name(scene: Scene) -> None:
    from support.kernels import Refused

    scene.operator.ask("SecretRemove", name="api-token")
    (missing,) = scene.operator.ask("Reload")["unavailable"]
    assert "api-token" in missing["reason"]
    assert TOKEN not in missing["reason"]
    scene.operator.ask("SecretSet", name="api-token", value=TOKEN.encode())
    assert scene.operator.ask("Reload")["unavailable"] == []
    for name in ("", "../x", "a/b", "a b", "x" * 300):
        with pytest.raises(Refused) as refused:
            scene.operator.ask("SecretSet", name=name, value=b"v")
        assert refused.value.exit_code == 2


def test_the_command_line_takes_a_secret_from_a_file_or_a_pipe(scene: Scene, tmp_path: Path) -> None:
    value = tmp_path / "value"
    value.write_text("from-a-file")
    data = str(scene.kernel.data)
    done = console("secrets", "set", "filed", "--from", str(value), "--data", data)
    assert done.returncode == 0, done.stderr
    piped = subprocess.run(
        [
            os.sys.executable,
            "-m",
            "ringfence.console",
            "secrets",
            "set",
            "piped",
            "--from",
            "-",
            "--data",
            data,
        ],
        input="from-a-pipe",
        capture_output=True,
        text=True,
        check=False,
    )
    assert piped.returncode == 0, piped.stderr
    assert "from-a" not in done.stdout + done.stderr + piped.stdout + piped.stderr
    assert scene.operator.ask("SecretList")["secrets"] == ["api-token", "filed", "logged", "piped"]
    assert console("secrets", "rm", "filed", "--data", data).returncode == 0
    assert console("secrets", "rm", "filed", "--data", data).returncode == 4


def test_nothing_of_the_data_directory_is_open_to_others(scene: Scene) -> None:
    """The last test: by now agents, points, artifacts and the embedded server have left what they leave."""
    data = scene.kernel.data
    assert data.stat().st_mode & 0o777 == (0o711 if os.geteuid() == 0 else 0o700)
    # Parts of it: the server's user has to read them, and sandboxes show the interpreter's names.
    shared = {"postgres", "interpreter"}
    open_to_others = [
        path.name for path in data.iterdir() if path.name not in shared and path.lstat().st_mode & 0o077
    ]
    assert open_to_others == []
