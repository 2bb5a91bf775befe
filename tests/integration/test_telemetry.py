"""Telemetry of a real kernel with real agents, as a collector receives it."""

from __future__ import annotations

import json
import re
import socket
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import AggregationTemporality
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from ringfence.agent import Denied
from support.collector import Collector, attributes_of, grpc_collector, http_collector
from support.kernels import eventually
from support.scenes import Held, Scene, console, manifest_of, scene_on, short_directory

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

SOON = {"OTEL_BSP_SCHEDULE_DELAY": "100", "OTEL_METRIC_EXPORT_INTERVAL": "200"}
MODEL_ATTRIBUTES = {  # held against the code in tests/unit/test_telemetry_recorder.py
    "gen_ai.operation.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "gen_ai.response.finish_reasons",
    "gen_ai.usage.input_tokens",
    "gen_ai.usage.output_tokens",
    "ringfence.usage.estimated",
    "ringfence.usage.cost_usd",
}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"

PROGRAM = """
from ringfence import agent
with agent.boot() as rf:
    for number in range(20):
        rf.state.put(f"told/{number}", number)
    rf.fs.write_text("out.txt", rf.fs.read_text("in.txt"))
"""


TWO_WRITES = """
from ringfence import agent
with agent.boot() as rf:
    rf.fs.write_text("a.txt", "a")
    rf.fs.write_text("b.txt", "b")
"""


def asking(collector: Collector, **more: str) -> dict[str, str]:
    return {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.endpoint, **SOON, **more}


def calls_of(held: Held) -> None:
    """One call of every kind of end, and an answer out of the journal."""
    held.rf.fs.write_text("a.txt", "a")
    assert held.rf.fs.read_text("a.txt") == "a"
    held.refused(Denied, lambda: held.rf.fs.read_text("/workspace/secret/key"))
    held.disconnect()
    stream = held.stream()
    assert stream.ask("no.such", step=3).failure.reason == "NoSuchSyscall"
    assert stream.ask("fs.read", b'{"path":7}', step=4).failure.reason == "InvalidRequest"
    assert stream.ask("fs.read", b'{"path":"gone"}', step=5).failure.reason == "NoSuchResource"
    again = stream.ask("fs.read", b'{"path":"a.txt"}', step=1)
    assert again.replayed
    stream.close()


def hold(scene: Scene) -> Held:
    allow, deny = ['fs.*: "/workspace/**"'], ['fs.read: "/workspace/secret/**"']
    return scene.hold(allow=allow, deny=deny, more="budgets: {total: {calls: 100}}")


def outcomes(scene: Scene) -> Counter[tuple[str, str]]:
    """Calls by action and outcome as the journal has them."""
    known = {"no.such": "no such syscall"}
    rows = scene.sql("select action, outcome from journal where phase = 1 and chain > 0")
    return Counter((known.get(action, action), outcome) for action, outcome in rows)


def test_one_span_for_every_call_and_sums_that_equal_the_journals(dsn: str) -> None:
    with (
        http_collector() as collector,
        scene_on(dsn, env=asking(collector, OTEL_SERVICE_NAME="fence")) as scene,
    ):
        held = hold(scene)
        calls_of(held)
        told = scene.run(
            PROGRAM, files={"in.txt": "x"}, allow=['fs.*: "/workspace/**"', 'state.*: "told/**"']
        )
        steps = {(held.id, s["step"]): s for s in held.steps()}
        steps |= {(told, s["step"]): s for s in scene.operator.steps(told)}
        status = scene.operator.ask("Status")["telemetry"]
        assert status == {"traces": True, "metrics": True, "problems": []}
        scene.kernel.stop()
        spans = [(span, attributes_of(span.attributes)) for span in collector.spans]
        made = [(span, found) for span, found in spans if not found["ringfence.replayed"]]
        assert (
            len({span.span_id for span, _ in spans})
            == len({span.trace_id for span, _ in spans})
            == len(spans)
        )
        # Exactly one for each step of each agent.
        assert sorted((f["ringfence.agent"], f["ringfence.step"]) for _, f in made) == sorted(steps)
        for span, found in made:
            step = steps[found["ringfence.agent"], found["ringfence.step"]]
            assert_span_tells(span, found, step)
        ((again, found),) = [(span, found) for span, found in spans if found["ringfence.replayed"]]
        assert (found["ringfence.action"], found["ringfence.outcome"]) == ("fs.read", "ok")
        assert again.name == "ringfence.v1.SyscallService/FsRead"
        assert collector.numbers("ringfence.calls") == outcomes(scene)
        assert_metrics(collector, scene)
        assert collector.names == documented("metric")
        assert {name for _, found in spans for name in found} | MODEL_ATTRIBUTES == documented("attribute")
    assert collector.resource("traces") == collector.resource("metrics")
    assert collector.resource("traces")["service.name"] == "fence"


def documented(head: str) -> set[str]:
    """Names in the first column of a table of docs/telemetry.md."""
    text = (Path(__file__).parents[2] / "docs" / "telemetry.md").read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\| {head} \|.*?\n\|[-|]+\n(.*?)^$", text, flags=re.DOTALL | re.MULTILINE)
    return {name for line in table.splitlines() for name in re.findall(r"`([^`]+)`", line.split(" | ")[0])}


def assert_span_tells(span: Any, found: dict[str, Any], step: dict[str, Any]) -> None:
    unknown = step["action"] == "no.such"
    assert found["ringfence.action"] == ("no such syscall" if unknown else step["action"])
    for key in ("verdict", "outcome", "lane", "lane_step", "branch"):
        assert found[f"ringfence.{key}"] == step[key], (key, step)
    for key in ("resource", "effect", "rule"):
        assert found.get(f"ringfence.{key}", "") == (step[key] or ""), (key, step)
    assert found.get("error.type") == step["reason"]
    assert found["rpc.system"] == "grpc"
    assert span.kind == Span.SPAN_KIND_SERVER
    assert unknown or span.name == f"{found['rpc.service']}/{found['rpc.method']}"
    numbers = {None: 0, "NoSuchSyscall": 12, "InvalidRequest": 3, "NoSuchResource": 5, "Denied": 7}
    assert found["rpc.grpc.status_code"] == numbers[step["reason"]]
    assert (span.status.code == Status.STATUS_CODE_ERROR) == unknown
    assert 0 <= span.end_time_unix_nano - span.start_time_unix_nano < 60e9
    assert "a.txt" not in json.dumps({k: v for k, v in found.items() if k != "ringfence.resource"})


def assert_metrics(collector: Collector, scene: Scene) -> None:
    durations = {
        labels["ringfence.action"]: point for labels, point in collector.last("ringfence.call.duration")
    }
    ran = outcomes(scene)
    assert durations["state.put"].count == ran["state.put", "ok"] == 20
    assert sum(durations["state.put"].bucket_counts) == 20
    assert len(durations["state.put"].bucket_counts) == len(durations["state.put"].explicit_bounds) + 1
    assert 0 < durations["state.put"].min <= durations["state.put"].sum / 20 <= durations["state.put"].max
    ((_, rows),) = collector.last("ringfence.journal.flush.rows")
    ((_, flushes),) = collector.last("ringfence.journal.flush.duration")
    total = scene.sql("select count(*) from journal")[0][0]
    assert rows.sum == collector.numbers("ringfence.journal.rows")[()] == total
    assert 0 < flushes.count == rows.count <= total
    ((_, starts),) = collector.last("ringfence.sandbox.start.duration")
    assert starts.count == 2
    verdicts = collector.numbers("ringfence.verdicts")
    assert verdicts["state.put", "allow"] == 20
    assert verdicts["fs.read", "deny"] == 2  # one by a rule, one that can't be read
    assert collector.numbers("ringfence.replays") == {("fs.read",): 1}
    assert collector.numbers("ringfence.sandboxes.live") == {(): 0}
    assert collector.numbers("ringfence.journal.queue") == {(): 0}
    assert collector.numbers("ringfence.spans.dropped") == {(): 0}


def test_no_span_with_the_sampler_off_and_metrics_all_the_same(dsn: str) -> None:
    with http_collector() as collector:
        env = asking(
            collector,
            OTEL_TRACES_SAMPLER="always_off",
            OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE="delta",
        )
        with scene_on(dsn, env=env) as scene:
            held = scene.hold(allow=['fs.*: "/workspace/**"'], more="budgets: {total: {calls: 5}}")
            held.rf.fs.write_text("a.txt", "a")
            key = (held.id, "calls", "total")
            eventually(lambda: collector.numbers("ringfence.budget.left").get(key) == 4, "no budget came")
            assert collector.numbers("ringfence.budget.limit")[key] == 5
            assert collector.numbers("ringfence.sandboxes.live") == {(): 1}
            assert collector.numbers("ringfence.agents")["running",] == 1
            scene.kernel.stop()
            delta = {AggregationTemporality.AGGREGATION_TEMPORALITY_DELTA}
            assert collector.temporalities("ringfence.calls") == delta
            assert collector.temporalities("ringfence.call.duration") == delta
            assert collector.spans == []


def test_the_calls_of_an_agent_belong_to_the_trace_it_was_submitted_in(dsn: str) -> None:
    with http_collector() as collector, scene_on(dsn, env=asking(collector)) as scene:
        for flags in ("01", "00"):
            text = manifest_of(f"flags{flags}", ["python", "agent.py"], allow=['fs.*: "/workspace/**"'])
            env = f'env: {{TRACEPARENT: "00-{TRACE}-{PARENT}-{flags}"}}'
            agent = scene.operator.submit(text.replace("run: {", f"run: {{{env}, "), {"agent.py": TWO_WRITES})
            scene.await_end(agent)
        scene.kernel.stop()
        spans = collector.spans
        assert [(s.trace_id.hex(), s.parent_span_id.hex()) for s in spans] == [(TRACE, PARENT)] * 2
        names = {attributes_of(span.attributes)["ringfence.agent.name"] for span in spans}
        assert names == {"flags01"}


def test_the_same_over_grpc(dsn: str) -> None:
    with grpc_collector() as collector:
        with scene_on(dsn, env=asking(collector, OTEL_EXPORTER_OTLP_PROTOCOL="grpc")) as scene:
            calls_of(hold(scene))
            scene.kernel.stop()
            assert collector.numbers("ringfence.calls") == outcomes(scene)
        assert len(collector.spans) == 7


def test_a_dead_collector_is_one_line_in_the_log(dsn: str) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen: nobody else gets the port
        env = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{bound.getsockname()[1]}", **SOON}
        env |= {"OTEL_EXPORTER_OTLP_TIMEOUT": "1", "OTEL_BSP_MAX_QUEUE_SIZE": "5"}
        with scene_on(dsn, env=env) as scene:
            held = hold(scene)
            lines = "telemetry can't be delivered"
            held.rf.fs.write_text("a.txt", "a")
            eventually(lambda: lines in scene.kernel.log.read_text(), "the log says nothing")
            for number in range(50):
                held.rf.fs.write_text("a.txt", str(number))
            assert held.rf.fs.read_text("a.txt") == "49"
            assert scene.kernel.stop() == 0
            said = scene.kernel.log.read_text()
            assert said.count(lines) == 1
            assert "Traceback" not in said


def test_without_the_packages_the_kernel_says_what_to_install_and_runs(dsn: str, tmp_path: Path) -> None:
    # An installation without the extra: what is found on the path is not found any more.
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\nclass Without:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] == 'opentelemetry':\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Without())\n"
    )
    env = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:4318", "PYTHONPATH": str(tmp_path)}
    with short_directory() as directory:
        data = ("--data", str(directory / "d"))
        up = console("up", "--detach", *data, env={**env, "RINGFENCE_DSN": dsn})
        try:
            status = json.loads(console("status", "--json", *data).stdout)
            shown = console("status", *data, env={"COLUMNS": "500"}).stdout
        finally:
            console("down", *data)
    assert up.returncode == 0, up.stderr
    (line,) = up.stderr.splitlines()
    assert "pip install 'ringfence[telemetry]'" in line
    assert line.removeprefix("telemetry: ") in shown
    assert status["telemetry"] == {
        "traces": False,
        "metrics": False,
        "problems": [line.removeprefix("telemetry: ")],
    }


def test_a_kernel_without_the_variables_loads_nothing_of_it() -> None:
    import subprocess

    program = (
        "import sys, ringfence.kernel.main\n"
        "print([m for m in sys.modules if m.startswith(('opentelemetry', 'ringfence.kernel.telemetry.'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "['ringfence.kernel.telemetry.settings']"
