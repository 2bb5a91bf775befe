"""A kernel dies while its engine makes a container: the next one's sweep leaves none, however late it comes."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from ringfence.sandbox.docker import DockerSandbox, DockerSettings
from ringfence.sandbox.docker.containers import Box, Shown, container
from ringfence.sandbox.docker.engine import Engine, EngineError
from ringfence.sandbox.docker.places import START_DIR, container_name
from ringfence.sandbox.types import Limits
from support.engines import base_image, engine

pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(120)]


class Dying:
    """A kernel that is no more since it was about to ask for a container."""

    def __init__(self, data: Path) -> None:
        self.box = DockerSandbox(data, DockerSettings(image=base_image()))
        self._places = self.box._places
        self.launch = uuid.uuid4().hex
        self.directory = data

    async def prepare(self) -> None:
        await self.box._prepare()
        self.directory = self._places.link(self.launch, self.box._engine.host)

    def ask(self) -> str:
        """The request, as it reaches the engine."""
        box = Box(
            image=base_image(),
            runtime="runc",
            uid=os.geteuid() or 65534,
            limits=Limits(),
            labels=self._places.labels("a", "program"),
            shown=[Shown(source=self.directory, target=START_DIR)],
        )
        wanted = container(box)
        made = engine().ask(lambda api: api.create_container_from_config(wanted, container_name(self.launch)))
        return str(made["Id"])

    def forget(self) -> None:
        """Whatever became of it."""
        if made(self.launch):
            engine().ask(lambda api: api.remove_container(container_name(self.launch), force=True))


@pytest.fixture
async def dying(tmp_path: Path) -> AsyncIterator[Dying]:
    found = Dying(tmp_path / "data")
    (tmp_path / "data").mkdir()
    await found.prepare()
    try:
        yield found
    finally:
        found.forget()
        await found.box.close()


def made(launch: str) -> bool:
    names: list[dict[str, Any]] = engine().ask(lambda api: api.containers(all=True))
    return any(f"/{container_name(launch)}" in one["Names"] for one in names)


async def test_a_request_that_is_served_while_the_next_kernel_sweeps(
    dying: Dying, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    after = DockerSandbox(tmp_path / "data", DockerSettings(image=base_image()))
    refused: list[EngineError] = []
    call = Engine.call

    async def late(self: Engine, work: Callable[[Any], Any], *, slow: bool = False) -> Any:
        answer = await call(self, work, slow=slow)
        if not refused and isinstance(answer, list):  # the containers that there are
            try:
                await asyncio.to_thread(dying.ask)
            except EngineError as error:
                refused.append(error)
        return answer

    monkeypatch.setattr(Engine, "call", late)
    assert await after.sweep() == []
    monkeypatch.undo()
    assert not made(dying.launch)
    assert not dying.directory.exists()
    assert refused
    await after.close()


async def test_a_container_that_is_not_listed_yet(dying: Dying, tmp_path: Path) -> None:
    """Its name is taken from the beginning; its labels are looked up in the end."""
    name = container_name(dying.launch)
    engine().ask(lambda api: api.create_container_from_config({"Image": base_image(), "Cmd": ["true"]}, name))
    after = DockerSandbox(tmp_path / "data", DockerSettings(image=base_image()))
    assert await after.sweep() == []
    assert not made(dying.launch)
    assert list((tmp_path / "data" / "sandboxes" / "docker" / "links").iterdir()) == []
    await after.close()
