"""What a manifest demands of its sandbox and names of the host: refused at once, with the place and what to do, or held."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import no_namespaces
from support.kernels import KernelProcess, Refused, running

HEAD = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: %s}\nspec:\n"
WRAP = (sys.executable, no_namespaces.__file__)


def manifest(sandbox: str, code: str = "pass", *, name: str = "bot", more: str = "") -> str:
    run = f"  run: {{command: [python, -c, {json.dumps(code)}]}}\n"
    return HEAD % name + run + f"  sandbox: {sandbox}\n" + more


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory that agents' uids can get to."""
    top = Path(tempfile.mkdtemp(prefix="ringfence-demands-"))
    top.chmod(0o755)
    (top / "allowed" / "tool").mkdir(parents=True)
    (top / "allowed" / "tool" / "fact").write_text("from the host")
    (top / "other").mkdir()
    (top / "allowed" / "out").symlink_to(top / "other")
    (top / "into").symlink_to(top / "allowed" / "tool")
    shutil.copy("/bin/sh", top / "allowed" / "tool" / "mine")
    yield top
    shutil.rmtree(top)


@pytest.fixture(scope="module")
def kernel(place: Path) -> Iterator[KernelProcess]:
    data = place / "allowed" / "data"
    text = f"apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  sandbox: {{mounts: [{place}/allowed, {place}/gone, /usr/lib]}}\n"
    with running(data, config=text) as process:
        yield process


def refusal(kernel: KernelProcess, text: str) -> str:
    before = kernel.operator.ask("List", all=True)["agents"]
    with pytest.raises(Refused) as refused:
        kernel.operator.submit(text, {})
    after = kernel.operator.ask("List", all=True)["agents"]
    assert [row["id"] for row in after] == [row["id"] for row in before]
    return str(refused.value)


def audited(kernel: KernelProcess, action: str) -> list[dict[str, Any]]:
    return [row for row in kernel.operator.stream("Audit") if row.get("action") == action]


def walls_of(kernel: KernelProcess, name: str, agent: str) -> dict[str, Any]:
    return {wall["name"]: wall for wall in kernel.operator.ask("Show", agent=agent)["sandbox"]["walls"]}[name]


@pytest.mark.parametrize(
    ("demand", "text"),
    [
        ("moat", "has no wall `moat`; it has: architecture"),
        ("seccomp:strict", "has one form only"),
        ("memory:none", "the wall `memory` stands as `"),
        ("landlock", "has no wall `landlock`"),
    ],
)
def test_a_demand_that_can_not_be_met_is_refused_with_its_place(
    kernel: KernelProcess, demand: str, text: str
) -> None:
    said = refusal(kernel, manifest(f"{{require: [overlay, '{demand}']}}"))
    assert said.startswith("test.yaml:6:32: ")
    assert text in said
    assert ";" in said
    assert "\n" not in said
    last = audited(kernel, "operator.submit_refused")[-1]
    assert last["resource"] == "bot"
    assert text in json.dumps(last, ensure_ascii=False)


def test_a_workspace_of_its_own_is_refused_where_there_is_none(kernel: KernelProcess) -> None:
    said = refusal(kernel, manifest("{backend: docker, workspace: direct}"))
    assert said == (
        "test.yaml: the sandbox `docker` has no `workspace: direct`: its overlays are for commands alone; use `backend: native`"
    )


def test_a_demand_that_is_met_runs_and_the_audit_says_how_it_is_confined(kernel: KernelProcess) -> None:
    first = kernel.operator.submit(manifest("{require: [all, uid]}"), {})
    uid = walls_of(kernel, "uid", first)["form"]
    assert uid in ({"own"} if os.geteuid() == 0 else {"sub", "namespace"})
    agent = kernel.operator.submit(manifest(f"{{require: [all, 'uid:{uid}', seccomp]}}"), {})
    assert kernel.operator.wait(agent)["state"] == "done"
    assert walls_of(kernel, "uid", agent)["form"] == uid
    assert walls_of(kernel, "seccomp", agent)["form"] is None
    assert kernel.operator.ask("Show", agent=agent)["sandbox"]["require"] == ["all", "seccomp", f"uid:{uid}"]
    (start,) = [row for row in kernel.operator.stream("Audit", agent=agent) if row["action"] == "agent.start"]
    said = json.dumps(start).replace("\\", "")
    assert '"backend": "native"' in said
    assert f'"uid": "{uid}"' in said
    assert re.search(r'"memory": "(cgroup-v\d|measured)"', said)
    kernel.operator.ask("Remove", agent=agent)


READ = """
import sys
from ringfence import agent
top = sys.argv[1]
print(open(top + "/fact").read())
with agent.boot() as rf:
    print(rf.exec.run([top + "/mine", "-c", "cat " + top + "/fact"]).stdout)
"""


def test_what_is_mounted_is_seen_by_the_program_and_its_commands(kernel: KernelProcess, place: Path) -> None:
    rules = '  permissions: {allow: [{exec.run: "*"}]}\n'
    for name in ("allowed/tool", "into"):
        command = f"  run: {{command: [python, agent.py, {place}/{name}]}}\n"
        text = HEAD % "bot" + command + f"  sandbox: {{mounts: [{place}/{name}]}}\n{rules}"
        agent = kernel.operator.submit(text, {"agent.py": READ})
        ended = kernel.operator.wait(agent)
        output = b"".join(kernel.operator.stream("Logs", agent=agent)).decode()
        assert ended["state"] == "done", ended
        assert output == "from the host\nfrom the host\n"
        assert kernel.operator.ask("Show", agent=agent)["sandbox"]["mounts"] == [f"{place}/{name}"]
        kernel.operator.ask("Remove", agent=agent)


def test_an_interpreter_in_a_mount_runs_the_program(kernel: KernelProcess, place: Path) -> None:
    command = f"  run: {{command: [{place}/allowed/tool/mine, -c, 'echo $0']}}\n"
    text = HEAD % "bot" + command + f"  sandbox: {{mounts: [{place}/allowed/tool]}}\n"
    agent = kernel.operator.submit(text, {})
    assert kernel.operator.wait(agent)["state"] == "done"
    assert b"".join(kernel.operator.stream("Logs", agent=agent)).decode() == f"{place}/allowed/tool/mine\n"
    kernel.operator.ask("Remove", agent=agent)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("{place}/other", "the kernel file does not allow"),
        ("{place}/allowed/out", "(it lies at `{place}/other`)"),
        ("{place}/allowed/absent", "no directory on this host"),
        ("{place}/allowed/tool/fact", "no directory on this host"),
        ("{place}/allowedly", "no directory on this host"),
        ("{place}/allowed", "where the kernel keeps what no agent may see (`{place}/allowed/data`)"),
        ("{place}/allowed/data", "where the kernel keeps"),
        ("{place}/allowed/data/agents", "where the kernel keeps"),
        ("/var/run", "does not allow"),
        ("/home", "does not allow"),
    ],
)
def test_what_may_not_be_mounted_is_refused_with_its_place(
    kernel: KernelProcess, place: Path, name: str, text: str
) -> None:
    said = refusal(kernel, manifest(f"{{mounts: [/usr/lib, {name.format(place=place)}]}}"))
    assert said.startswith("test.yaml:6:32: `sandbox.mounts` names `")
    assert text.format(place=place) in said
    assert ";" in said


def test_a_mount_that_is_allowed_no_longer_stops_the_next_start(kernel: KernelProcess, place: Path) -> None:
    text = kernel.config.read_text()
    failing = manifest(f"{{mounts: [{place}/allowed/tool]}}", "1 / 0", more="  restart: {policy: never}\n")
    agent = kernel.operator.submit(failing, {})
    assert kernel.operator.wait(agent)["state"] == "failed"
    kernel.config.write_text(text.replace(f"{place}/allowed", f"{place}/other"))
    kernel.operator.ask("Reload")
    with pytest.raises(Refused, match="the kernel file does not allow"):
        kernel.operator.ask("Start", agent=agent)
    kernel.config.write_text(text)
    kernel.operator.ask("Reload")
    kernel.operator.ask("Start", agent=agent)
    assert "exit status 1" in kernel.operator.wait(agent)["error"]
    kernel.operator.ask("Remove", agent=agent)


def test_where_there_are_no_namespaces_agents_are_refused(tmp_path: Path) -> None:
    """Case C20: `unshare` fails. Nothing runs weaker, whatever the manifest says, and doctor says why."""
    with running(tmp_path / "data", wrap=WRAP) as kernel:
        for text in (
            manifest("{}"),
            manifest("{require: [seccomp]}"),
            manifest("{}", more="  schedule: {every: 1h}\n"),
        ):
            said = refusal(kernel, text)
            assert "this host lacks the sandbox's wall `" in said
            assert re.search(r"; .+", said)
            assert "namespace" in json.dumps(audited(kernel, "operator.submit_refused")[-1])
        assert not list((kernel.data / "agents").glob("*"))
    argv = [
        *WRAP,
        sys.executable,
        "-m",
        "ringfence.console",
        "doctor",
        "--json",
        "--data",
        str(tmp_path / "data"),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    missing = [check for check in report["checks"] if check["required"] and not check["ok"]]
    assert (done.returncode, report["ok"]) == (1, False)
    assert {"namespaces", "seccomp"} <= {check["name"] for check in missing}
    assert all(check["fix"] for check in missing)
