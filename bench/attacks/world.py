"""The parts of a replay, started and ended together: tool server, kernel, drivers; and the committed roles."""

from __future__ import annotations

import contextlib
import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML

from bench.attacks.replay import Case, Desk, Driver, Inbox
from bench.host import serving

HERE = Path(__file__).parent
SUITES = ("banking", "workspace")
"""Those that the aims are about."""
BLIND = ("slack",)
"""Those whose roles were written without a look at calls, answers or attacks, and stayed as they were."""
BARE_PORT = ":9000/"

EVERYTHING = """apiVersion: ringfence/v1
kind: Agent
metadata: {name: unguarded}
spec:
  run: {command: [sleep, infinity]}
  permissions:
    allow: [http.*: "http://127.0.0.1:*/tools/**"]
"""
"""What an agent may do where nobody thought about it."""

READERS = {"banking": "bank-question", "workspace": "office-question"}


def classes() -> dict[str, dict[str, str]]:
    """The role of every user task, by suite."""
    told: Any = YAML(typ="safe").load((HERE / "classes.yaml").read_text())
    return {
        suite: {f"user_task_{number}": role for role, numbers in roles.items() for number in numbers}
        for suite, roles in told.items()
    }


def manifest(role: str) -> str:
    """The committed manifest of a role."""
    return (HERE / "roles" / f"{role}.yaml").read_text()


def without_conditions(text: str) -> str:
    """The same manifest, with its rules alone."""
    yaml = YAML()
    document: Any = yaml.load(text)
    document["spec"].pop("when", None)
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


def kernel_file(ports: list[int], *, plain: bool) -> str:
    """The operator's file, with the resources of one desk repeated for each; `plain`: nothing is said of what tools do."""
    yaml = YAML()
    document: Any = yaml.load((HERE / "kernel.yaml").read_text())
    declared = document["spec"]["resources"].pop("tools")
    if plain:
        declared = {key: declared[key] for key in ("type", "base")}
    for number, port in enumerate(ports):
        base = declared["base"].replace(BARE_PORT, f":{port}/")
        document["spec"]["resources"][f"tools-{number}"] = {**copy.deepcopy(declared), "base": base}
    out = io.StringIO()
    yaml.dump(document, out)
    return out.getvalue()


@contextlib.contextmanager
def opened(directory: Path, desks: int, *, plain: bool = False) -> Iterator[list[Driver]]:
    """Tool server, kernel and drivers; nothing of them is left afterwards.

    Args:
        directory: for all that they write.
        desks: how many runs go on at a time.
        plain: the tools are declared without their effects, as by an operator who thought about nothing.
    """
    with contextlib.ExitStack() as stack:
        _, tools = stack.enter_context(
            serving("bench.attacks.tools", "--desks", str(desks), log=directory / "tools.log")
        )
        config = directory / "kernel.yaml"
        config.write_text(kernel_file(tools["ports"], plain=plain))
        options = ("--data", str(directory / "k"), "--config", str(config))
        _, kernel = stack.enter_context(
            serving("bench.attacks.kernel", *options, log=directory / "kernel.log")
        )
        inbox = Inbox(kernel["listen"])
        stack.callback(inbox.close)
        drivers: list[Driver] = []
        for port in tools["ports"]:
            drivers.append(Driver(kernel["listen"], Path(kernel["doors"]), Desk(port), inbox))
            stack.callback(drivers[-1].close)
        yield drivers


def cases(policy: str, suites: dict[str, Any], answer: str) -> list[Case]:
    """All user tasks, alone and under every attack.

    Args:
        policy: `none`, `readers`, `roles` or `facts`.
        suites: user tasks and attacks by suite, as `tools` tells them.
        answer: what a person says to what is asked.
    """
    known = classes()
    found: list[Case] = []
    for suite, told in suites.items():
        for user in told["users"]:
            text = _manifest(policy, suite, known[suite][user])
            found += [
                Case(suite=suite, user=user, attack=attack, manifest=text, answer=answer)
                for attack in ("", *told["attacks"])
            ]
    return found


def _manifest(policy: str, suite: str, role: str) -> str:
    if policy == "none":
        return EVERYTHING
    text = manifest(READERS[suite] if policy == "readers" else role)
    return text if policy == "facts" else without_conditions(text)
