"""Readers of what the kernel file says of single backends: `sandbox.docker` and `sandbox.remote`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from ringfence.policy.reader import Reader
from ringfence.policy.strict_yaml import Node, Table

KEYS: Final = ("image", "runtime", "host")
REMOTE_KEYS: Final = ("address", "certs")
RUNTIMES: Final = ("runc", "runsc")
IMAGE_PATTERN: Final = "([a-z0-9][a-z0-9._/:-]{0,254}@)?sha256:[0-9a-f]{64}"
HOST_PATTERN: Final = "unix:///[^\\s]+"
ADDRESS_PATTERN: Final = "([^\\s:/@]+|\\[[0-9a-fA-F:.]+\\]):[0-9]{1,5}"
DIRECTORY_PATTERN: Final = "/.*"
_ADDRESS: Final = re.compile(ADDRESS_PATTERN)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteSpec:
    """Where sandboxes of the remote backend run.

    Attributes:
        address: of the sandbox host, `HOST:PORT`; empty: none is named.
        certs: directory with this kernel's certificate.
    """

    address: str = ""
    certs: str = ""


def read_remote(reader: Reader, sandbox: Node) -> RemoteSpec:
    """The section `remote` of `spec.sandbox`, if there is one."""
    node = _section(sandbox, "remote")
    if node is None:
        return RemoteSpec()
    what = "spec.sandbox.remote"
    fields = reader.mapping(node, what, REMOTE_KEYS)
    found = {key: reader.text(value, f"{what}.{key}") or "" for key, (_, value) in fields.items()}
    for key, example in (("address", "big-machine:7443"), ("certs", "/etc/ringfence/kernel")):
        if key not in fields and isinstance(node, Table):
            reader.wrong(node, f"`{what}` has no `{key}`", f"write `{key}`, such as `{example}`")
    address, certs = found.get("address", ""), found.get("certs", "")
    if address and not (_ADDRESS.fullmatch(address) and 0 < int(address.rpartition(":")[2]) < 1 << 16):
        reader.wrong(fields["address"][1], f"`{address}` is no address", "write `HOST:PORT`")
    if certs and not certs.startswith("/"):
        reader.wrong(
            fields["certs"][1],
            f"`{certs}` is no absolute path",
            "write the whole path of a directory that `ringfence sandbox-certs` made",
        )
    return RemoteSpec(address=address, certs=certs)


def _section(sandbox: Node, name: str) -> Node | None:
    entries = sandbox.entries if isinstance(sandbox, Table) else []
    return next((value for key, value in entries if key.text == name), None)


def read_docker(reader: Reader, sandbox: Node) -> DockerSpec:
    """The section `docker` of `spec.sandbox`, if there is one."""
    node = _section(sandbox, "docker")
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
