"""Reader of what the kernel file says of the docker backend (`sandbox.docker`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node, Table

KEYS: Final = ("image", "runtime", "host")
RUNTIMES: Final = ("runc", "runsc")
IMAGE_PATTERN: Final = "([a-z0-9][a-z0-9._/:-]{0,254}@)?sha256:[0-9a-f]{64}"
HOST_PATTERN: Final = "unix:///[^\\s]+"
_IMAGE: Final = re.compile(IMAGE_PATTERN, re.ASCII)
_HOST: Final = re.compile(HOST_PATTERN)


@dataclass(frozen=True, slots=True, kw_only=True)
class DockerSpec:
    """Which engine runs docker sandboxes, and in which image.

    Attributes:
        image: by digest: `sha256:…`, or `NAME@sha256:…`; empty: none is named.
        runtime: the engine's runtime.
        host: the engine's socket, `unix:///…`; empty: the usual one.
    """

    image: str = ""
    runtime: str = "runc"
    host: str = ""


def read_docker(reader: Reader, sandbox: Node) -> DockerSpec:
    """The section `docker` of `spec.sandbox`, if there is one."""
    entries = sandbox.entries if isinstance(sandbox, Table) else []
    node = next((value for key, value in entries if key.text == "docker"), None)
    if node is None:
        return DockerSpec()
    what = "spec.sandbox.docker"
    fields = reader.mapping(node, what, KEYS)
    image = host = ""
    if "image" in fields:
        image = reader.text(fields["image"][1], f"{what}.image") or ""
        if image and _IMAGE.fullmatch(image) is None:
            reader.wrong(
                fields["image"][1],
                f"`{image}` names no digest",
                "write the `sha256:…` that `ringfence image build` prints, or `NAME@sha256:…`; a tag can come to mean another image",
            )
    elif fields or isinstance(node, Table):
        reader.wrong(
            node, f"`{what}` has no `image`", "write the `sha256:…` that `ringfence image build` prints"
        )
    if "host" in fields:
        host = reader.text(fields["host"][1], f"{what}.host") or ""
        if host and _HOST.fullmatch(host) is None:
            reader.wrong(fields["host"][1], f"`{host}` is no socket of this host", "write `unix:///PATH`")
    runtime = (
        reader.choice(fields["runtime"][1], f"{what}.runtime", RUNTIMES, "runc")
        if "runtime" in fields
        else "runc"
    )
    return DockerSpec(image=image, runtime=runtime, host=host)
