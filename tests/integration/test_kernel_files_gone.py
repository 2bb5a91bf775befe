"""An agent whose directory is removed from outside ends as failed, with the reason, and commands say it in one line."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from support.kernels import KernelProcess, Refused, eventually, running
from support.scenes import manifest_of

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(120)]

SLEEPER = manifest_of("sleeper", ["sleep", "100000"], allow=['fs.*: "/workspace/**"'])


def row(kernel: KernelProcess, agent: str) -> dict[str, Any]:
    (found,) = (r for r in kernel.operator.ask("List", all=True)["agents"] if r["id"] == agent)
    return found


def refused(kernel: KernelProcess, name: str, **fields: Any) -> str:
    ask = kernel.operator.stream if name == "Pull" else kernel.operator.ask
    with pytest.raises(Refused) as caught:
        ask(name, **fields)
    assert caught.value.exit_code in (1, 4)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_removed_directory_ends_its_agent(tmp_path: Path) -> None:
    with running(tmp_path / "d") as kernel:
        agent, idle = (kernel.operator.submit(SLEEPER, {"a.txt": "a"}) for _ in range(2))
        home = kernel.data / "agents" / agent
        pid = kernel.operator.ask("Show", agent=agent)["pid"]
        shutil.rmtree(home)
        for name, more in (("Pull", {}), ("Rollback", {"to": "0"}), ("Diff", {})):
            assert f"its files are gone: `{home}` was removed" in refused(kernel, name, agent=agent, **more)
        ended = kernel.operator.wait(agent)
        assert ended["state"] == "failed"
        assert ended["error"].startswith(f"its files are gone: `{home}` was removed; submit it again")
        assert not Path(f"/proc/{pid}").exists()
        assert "its files are gone" in refused(kernel, "Start", agent=agent)
        assert (row(kernel, agent)["state"], row(kernel, agent)["process"]) == ("failed", "none")
        assert not home.exists()
        assert row(kernel, idle)["state"] == "running"

        # The same while no kernel runs.
        kernel.kill()
        shutil.rmtree(kernel.data / "agents" / idle)
        kernel.start()
        eventually(lambda: row(kernel, idle)["state"] == "failed", "it stays as it was")
        for name, more in (("Show", {}), ("Pull", {}), ("Rollback", {"to": "0"}), ("Start", {})):
            assert "its files are gone" in refused(kernel, name, agent=idle, **more)
        assert kernel.operator.ask("AuditVerify")["ok"]
