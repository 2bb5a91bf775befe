"""`image build`: the base image of docker sandboxes, made of this host's own interpreter. Needs no kernel and no registry."""

from __future__ import annotations

import tempfile
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Any

import click
from ringfence.console import render
from ringfence.console.durations import size
from ringfence.console.errors import ConsoleError, os_error_text
from ringfence.console.session import Commands, Session
from ringfence.console.text import safe
from ringfence.sandbox.types import SandboxError

commands = Commands()


@commands.add("build", "ringfence image build", "ringfence image build --to base.tar")
@click.option(
    "--add", "more", multiple=True, metavar="PATH", help="A file or directory of this host that goes along."
)
@click.option("--tag", default="ringfence-base:latest", show_default=True, help="The engine's name for it.")
@click.option("--host", default="", metavar="unix:///PATH", help="The engine's socket.")
@click.option(
    "--to", "file", type=click.Path(dir_okay=False), help="Write an archive for `docker load` instead."
)
def build(session: Session, more: tuple[str, ...], tag: str, host: str, file: str | None) -> int:
    """Build the base image of docker sandboxes and load it into the engine.

    It holds the interpreter that runs this command, the agent library and what both need, all of it from this host: no
    registry, no network. The same files make the same digest, which belongs into the kernel file.
    """
    image = import_module("ringfence.sandbox.docker.image")
    paths = [Path(path).absolute() for path in more]
    try:
        if file is not None:
            with Path(file).open("w+b") as archive:
                built = image.build(archive, tag, paths)
            known = built.digest
        else:
            engine = import_module("ringfence.sandbox.docker.engine")
            # Asked before the work is done, not after.
            reached = engine.Engine(host or engine.usual_host())
            image.find(reached, tag)
            with tempfile.TemporaryFile() as archive:
                built = image.build(archive, tag, paths)
                known = image.load(reached, archive, tag)
    except SandboxError as error:
        raise ConsoleError(str(error)) from error
    except OSError as error:
        raise ConsoleError(
            f"the image can't be written: {os_error_text(error)}; free some space, or set TMPDIR"
        ) from error
    _show(session, {**asdict(built), "image": known, "tag": tag, "file": file})
    return 0


def _show(session: Session, found: dict[str, Any]) -> None:
    if session.as_json:
        keys = ("image", "tag", "files", "size_bytes", "file")
        render.emit({key: found[key] for key in keys})
        return
    render.say(f"{safe(found['image'])}  {found['files']} files, {size(found['size_bytes'])}")
    if found["file"] is not None:
        render.say(f"load it: docker load --input {safe(found['file'])}")
    render.say("in the kernel file:")
    render.say(f'  sandbox: {{docker: {{image: "{safe(found["image"])}"}}}}')
