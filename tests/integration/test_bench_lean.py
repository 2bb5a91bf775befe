"""The generator of `python -m bench` and the echoes that it is held against: one protocol, whoever speaks it."""

from __future__ import annotations

import argparse
import gc

import pytest

from bench import echo, lean


@pytest.mark.parametrize("door", [False, True])
@pytest.mark.parametrize("grpc", [False, True])
async def test_each_client_gets_all_its_answers_of_each_echo(tmp_path, door, grpc):
    # So many bytes both ways that each side has to be told of more room than it has at first.
    calls, answer = 1200, 200
    servers, targets = await echo.start(tmp_path, 2, door=door, size=answer)
    work = lean.workload("x" * 60, "key", 5, "0")
    options = argparse.Namespace(
        calls=calls, seconds=0.0, lane="0", answered=tmp_path / "answered", grpc=grpc
    )
    try:
        report = await lean.run(targets, [work, work], options)
    finally:
        gc.unfreeze()
        for server in servers:
            await echo.stop(server)
    assert (report["calls"], report["failed"]) == (2 * calls, 0)
    assert (report["fs.read"]["calls"], report["state.put"]["calls"]) == (2 * calls * 4 // 5, 2 * calls // 5)
    steps = [line.split()[1] for line in options.answered.read_text().splitlines()]
    assert sorted(map(int, steps)) == sorted([*range(calls)] * 2)


async def test_a_door_that_refuses_ends_the_generator_with_what_it_said(tmp_path):
    servers, targets = await echo.start(tmp_path, 1)
    stream = lean.Stream(targets[0], "/ringfence.v1.SyscallService/Nothing")
    try:
        with pytest.raises(SystemExit, match="no welcome: UNIMPLEMENTED"):
            await stream.open("0")
    finally:
        await stream.close()
        await echo.stop(servers[0])
