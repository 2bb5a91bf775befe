"""`python -m bench`: what Ringfence costs, as ratios against references measured in the same run."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psycopg
from ringfence.console.errors import ConsoleError

from bench.host import Bench, BenchError, facts, scratch

if TYPE_CHECKING:
    from bench.report import Section

MEASUREMENTS = {
    "calls": "durable calls of the lean generator beside a bare echo and single inserts",
    "agents": "the same with real agents in their sandboxes",
    "decision": "a policy decision, warm and cold",
    "starts": "an agent from submission to its end, beside a bare Python",
    "sandbox": "starting sandboxes and fleets of them, beside bare programs and other sandboxes",
    "library": "importing the agent library, and its part of a call",
    "resume": "from kill -9 of the kernel to all agents running again",
    "steps": "durable steps of one agent, and the bytes they leave, beside DBOS and LangGraph",
    "fleets": "many agents killed in flight and resumed, asleep, and woken together, beside DBOS",
    "replay": "replay of 1 000 to 100 000 steps: memory of kernel and agent, and time",
    "points": "a rollback point and a command at growing workspaces",
    "rollback": "points before calls and rollbacks, beside cp -a, git and nono",
    "doors": "a model's replies, tokens and tool calls by a sandbox's doors, beside the bare endpoint",
    "telemetry": "calls with OpenTelemetry off, and on at several samplings",
    "revoke": "from revoke to the first refusal, with two kernels on one database",
    "attacks": "AgentDojo's attacks replayed: tasks that still work, attacks that get through",
    "durability": "kill -9 of PostgreSQL: every answered call is found",
}
LONGEST_S = 1800


def main() -> int:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    names = "\n".join(f"  {name:12}{text}" for name, text in MEASUREMENTS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"measurements:\n{names}"
    parser.add_argument("--quick", action="store_true", help="two to three minutes in all")
    parser.add_argument(
        "--only", action="append", choices=list(MEASUREMENTS), metavar="NAME", help="may be repeated"
    )
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    parser.add_argument(
        "--dir", help="directory on the disk to measure; default: the system's for temporary files"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGALRM, _too_long)
    signal.signal(signal.SIGTERM, _interrupted)
    signal.alarm(LONGEST_S)
    try:
        document = _run(options)
    except KeyboardInterrupt:
        print("bench: interrupted; nothing is left running", file=sys.stderr)
        return 130
    if options.json:
        print(json.dumps(document, indent=2))
    failed = [s["name"] for s in document["sections"] if "error" in s or not all(s["checks"].values())]
    if failed:
        print(f"bench: failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _too_long(*_: object) -> None:
    print(f"bench: the run took longer than {LONGEST_S} s and is ended", file=sys.stderr)
    raise KeyboardInterrupt


def _interrupted(*_: object) -> None:
    raise KeyboardInterrupt


def _run(options: argparse.Namespace) -> dict[str, Any]:
    names = [name for name in MEASUREMENTS if not options.only or name in options.only]
    with scratch(options.dir) as directory:
        machine = facts(directory)
    if not options.json:
        load = " ".join(str(n) for n in machine["load"])
        sync = f"one fdatasync {machine['fdatasync_us']} µs"
        idle = f"{machine['idle_share']:.0%} idle before the run"
        print(f"{machine['cores']} cores, {idle}, load {load}, {sync}", flush=True)
        if machine["idle_share"] < 0.8:
            print("other processes use this machine: read the ratios, not the figures", flush=True)
    sections: list[dict[str, Any]] = []
    began = time.monotonic()
    with _progress(options.json) as say, scratch(options.dir) as directory:
        bench = Bench(quick=options.quick, scratch=directory, say=say)
        sections += [_one(bench, name, quiet=options.json) for name in names]
    return {
        "machine": machine,
        "quick": options.quick,
        "seconds": round(time.monotonic() - began, 1),
        "sections": sections,
    }


def _one(bench: Bench, name: str, *, quiet: bool) -> dict[str, Any]:
    began = time.monotonic()
    try:
        section: Section = importlib.import_module(f"bench.{name}").measure(bench)
    except (BenchError, ConsoleError, psycopg.Error, OSError, subprocess.SubprocessError) as error:
        bench.say("")
        print(f"{name}: can't be measured: {' '.join(str(error).split())}", file=sys.stderr)
        return {"name": name, "error": str(error), "rows": [], "checks": {}}
    section.seconds = time.monotonic() - began
    bench.say("")
    if not quiet:
        print(f"\n{section.text()}", flush=True)
    return section.json()


@contextlib.contextmanager
def _progress(quiet: bool) -> Iterator[Any]:
    """One line that is written over, on a terminal only."""
    shown = sys.stderr.isatty() and not quiet

    def say(text: str) -> None:
        if shown:
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)

    try:
        yield say
    finally:
        say("")


if __name__ == "__main__":
    sys.exit(main())
