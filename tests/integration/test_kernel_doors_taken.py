"""Doors of the kernel file whose address somebody else has: `up --detach` and `reload` say so, and not `status` alone."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.scenes import console, short_directory

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

DOORS = {
    "a2a": 'clients: {shop: {key: {secret: shop-key}, agents: ["*"]}}',
    "callback": "people: {anna: {key: {secret: anna-key}, account: anna}}",
}


@pytest.fixture
def dsn(postgres_server: Any, template_database: str) -> Iterator[str]:
    name = postgres_server.create(template_database)
    yield postgres_server.dsn(name)
    postgres_server.drop(name)


@pytest.mark.parametrize("door", DOORS)
def test_an_address_that_is_taken_is_said_at_once(dsn: str, door: str) -> None:
    with short_directory() as directory, socket.create_server(("127.0.0.1", 0)) as theirs:
        port = str(theirs.getsockname()[1])
        other = next(name for name in DOORS if name != door)
        file = Path(directory) / "ringfence.yaml"
        declared = f'{door}: {{listen: "127.0.0.1:{port}", {DOORS[door]}}}'
        file.write_text(f"apiVersion: ringfence/v1\nkind: Kernel\nspec:\n  {declared}\n")
        data = ("--data", str(Path(directory) / "d"))
        started = console("up", "--detach", "--config", str(file), *data, env={"RINGFENCE_DSN": dsn})
        try:
            assert started.returncode == 0, started.stderr
            (said,) = [line for line in started.stderr.splitlines() if f"{door}: " in line]
            assert port in said
            again = console("reload", *data)
            assert again.returncode == 0, again.stderr
            assert [line for line in again.stdout.splitlines() if line.startswith(door) and port in line]
            document = json.loads(console("reload", "--json", *data).stdout)
            assert (port in document[door]["problem"], document[other]) == (True, None)
            assert console("status", *data).returncode == 1
            # With the address free, the next reload opens it.
            theirs.close()
            assert json.loads(console("reload", "--json", *data).stdout)[door]["problem"] is None
        finally:
            console("down", *data)
