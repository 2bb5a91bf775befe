"""The files of deploy/ as their own tools read them, and what a service manager hears of a real kernel."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from support.kernels import KernelProcess
from support.scenes import console, short_directory

REPOSITORY = Path(__file__).parents[2]
DEPLOY = REPOSITORY / "deploy"
UNITS = {
    "ringfence.service": "/opt/ringfence/bin/ringfence",
    "ringfence-user.service": "%h/.local/bin/ringfence",
}


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"`{name}` is not installed")
    return found


def verify(directory: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    """What systemd says of a unit whose program is there."""
    installed = Path(sys.executable).with_name("ringfence")
    assert installed.is_file()
    unit = directory / name
    unit.write_text(text.replace(UNITS[name], str(installed)))
    manager = ["--user"] if "user" in name else []
    return subprocess.run(
        [tool("systemd-analyze"), *manager, "verify", "--man=no", str(unit)],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "XDG_RUNTIME_DIR": str(directory)},
    )


@pytest.mark.parametrize("name", UNITS)
def test_systemd_has_nothing_to_say_about_the_units(name: str, tmp_path: Path) -> None:
    text = (DEPLOY / name).read_text(encoding="utf-8")
    assert text.count(f"ExecStart={UNITS[name]} ") >= 1
    done = verify(tmp_path, name, text)
    assert (done.returncode, done.stderr) == (0, "")
    # It would have: a misspelt key is a warning to systemd, and exit status 0.
    assert "KillMood" in verify(tmp_path, name, text.replace("KillMode", "KillMood")).stderr


@pytest.mark.parametrize("name", UNITS)
def test_the_command_of_a_unit_is_one(name: str) -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", (DEPLOY / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    done = console(*line.split()[1:], "--help")
    assert done.returncode == 0, done.stderr
    assert "Start the kernel." in done.stdout


def test_compose_reads_the_file(tmp_path: Path) -> None:
    nothing = tmp_path / "env"
    nothing.touch()
    argv = [
        tool("docker-compose"),
        "--env-file",
        str(nothing),
        "--file",
        str(DEPLOY / "compose.yaml"),
        "config",
    ]
    env = {**os.environ, "DATABASE_PASSWORD": "s3cret"}
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env, cwd=DEPLOY)
    assert done.returncode == 0, done.stderr
    from ruamel.yaml import YAML

    services = YAML(typ="safe").load(done.stdout)["services"]
    kernel = services["kernel"]
    assert kernel["environment"]["RINGFENCE_DSN"] == "postgresql://ringfence:s3cret@database/ringfence"
    assert (kernel["cap_drop"], kernel["read_only"], kernel["init"]) == (["ALL"], True, True)
    assert Path(kernel["build"]["context"]) == REPOSITORY
    assert (REPOSITORY / kernel["build"]["dockerfile"]).is_file()
    assert "networks" in services["database"]
    assert "ports" not in services["database"]
    # Without the password it starts nothing.
    del env["DATABASE_PASSWORD"]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, env=env, cwd=DEPLOY)
    assert done.returncode != 0
    assert "DATABASE_PASSWORD" in done.stderr


def test_the_seccomp_profile_leaves_what_a_sandbox_is_made_of() -> None:
    profile = json.loads((DEPLOY / "seccomp.json").read_text(encoding="utf-8"))
    (rule,) = profile["syscalls"]
    assert (profile["defaultAction"], rule["action"]) == ("SCMP_ACT_ALLOW", "SCMP_ACT_ERRNO")
    needed = {
        "unshare",
        "setns",
        "mount",
        "umount2",
        "pivot_root",
        "seccomp",
        "landlock_restrict_self",
        "clone3",
    }
    assert needed.isdisjoint(rule["names"])
    assert {"bpf", "ptrace", "io_uring_setup", "kexec_load", "init_module", "keyctl"} <= set(rule["names"])


def test_the_image_is_built_of_every_portion() -> None:
    allowed = {
        line.removeprefix("!")
        for line in (REPOSITORY / ".dockerignore").read_text(encoding="utf-8").splitlines()
        if line.startswith("!")
    }
    portions = {"kernel", "policy", "sandbox", "syscalls", "proto"}
    assert allowed == portions | {"LICENSE", "README.md", "pyproject.toml", "requirements.lock"}
    assert all((REPOSITORY / name).exists() for name in allowed)


@pytest.mark.postgres
@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_hears_when_the_kernel_is_ready_and_when_it_stops(dsn: str, abstract: bool) -> None:
    with short_directory() as directory, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        place = f"@ringfence-test-{os.getpid()}" if abstract else str(directory / "notify")
        manager.bind("\0" + place[1:] if abstract else place)
        manager.settimeout(60)
        kernel = KernelProcess(directory / "d", dsn=dsn)
        try:
            operator = kernel.start(NOTIFY_SOCKET=place)
            said = manager.recv(4096).decode().splitlines()
            assert said[0] == "READY=1"
            assert said[1] == f"STATUS=listens on {operator.ask('Status')['listen']}"
        finally:
            assert kernel.stop() == 0
        assert manager.recv(4096) == b"STOPPING=1"


@pytest.mark.postgres
def test_a_manager_that_is_gone_is_a_line_in_the_log(dsn: str) -> None:
    with short_directory() as directory:
        kernel = KernelProcess(directory / "d", dsn=dsn)
        try:
            kernel.start(NOTIFY_SOCKET=str(directory / "nobody"))
        finally:
            assert kernel.stop() == 0
        assert kernel.log.read_text().count("the service manager can't be told") == 2
