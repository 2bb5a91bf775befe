"""`submit`: checks a manifest here, packs its workspace, and hands both to the kernel."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import click
from ringfence.console import render
from ringfence.console.durations import size
from ringfence.console.errors import ConsoleError, ExitCode, os_error_text
from ringfence.console.pack import pack, packed_bytes
from ringfence.console.progress import Progress
from ringfence.console.session import Commands, Session
from ringfence.policy.problems import ManifestError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ringfence.console.client import Client
    from ringfence.policy.manifest import Manifest

commands = Commands()

MANIFEST_BYTES_MAX = 256 << 10
INPUT_BYTES_MAX = 16 << 20


class _Options(TypedDict):
    input_file: str | None
    name: str | None
    wait: bool
    overrides: tuple[str, ...]


@commands.add(
    "submit",
    "ringfence submit agent.yaml --wait",
    "echo '{\"month\": 7}' | ringfence submit agent.yaml --input - --name july --set spec.run.env.REGION=eu",
)
@click.argument("manifest", type=click.Path(allow_dash=True))
@click.option("--input", "input_file", metavar="FILE|-", help="What the agent finds on its standard input.")
@click.option("--name", metavar="NAME", help="Name instead of the manifest's.")
@click.option(
    "--wait",
    is_flag=True,
    help="Follow it to the end, with a schedule of its first run; exit 0 only when it is done.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="PATH=VALUE", help="Change a value of the manifest."
)
def submit(session: Session, manifest: str, **options: Unpack[_Options]) -> int:
    """Check a manifest, create the agent, start it and print its id.

    The workspace named in the manifest is copied in; nothing the agent does touches the original.
    """
    if manifest == "-" and options["input_file"] == "-":
        raise ConsoleError(
            "manifest and input can't both be standard input; name a file for one", ExitCode.USAGE
        )
    if options["name"] == "":
        raise ConsoleError(
            "`--name` is empty; give a name, or leave it out to take the manifest's", ExitCode.USAGE
        )
    source = "manifest" if manifest == "-" else manifest
    text = read_text(manifest, "manifest")
    if options["overrides"]:
        from ringfence.console.overrides import apply_overrides  # noqa: PLC0415 - few submits need its YAML

        text = apply_overrides(text, options["overrides"])
    checked = check_manifest(text, source)
    workspace = _workspace(checked, manifest)
    header = {
        "manifest": text,
        "source": source,
        "name": options["name"] or "",
        "input": _read_input(options["input_file"]),
    }
    client = session.client()
    answer = _upload(session, header, workspace)
    if not options["wait"]:
        _print_id(session, answer)
        return ExitCode.OK
    if not session.as_json:
        _print_id(session, answer)
    if answer.get("waiting_for"):
        render.note(f"{answer.get('name') or answer['id']}: waits for {answer['waiting_for']}")
    try:
        end = _follow(client, answer)
    except KeyboardInterrupt:
        render.note(f"the agent goes on; see it with: ringfence show {answer['id']}")
        raise
    if session.as_json:
        render.emit({**answer, **end})
    return _finish(answer, end)


def _follow(client: Client, answer: dict[str, Any]) -> dict[str, Any]:
    """Wait for the end. One that is parked for a person is said once, and waited for."""
    parked_for = ""
    while True:
        end = client.call("Wait", agent=answer["id"], parked_for=parked_for)
        if end.get("state") != "parked" or not end.get("waiting_for"):
            return end
        parked_for = str(end["waiting_for"])
        name = answer.get("name") or answer["id"]
        render.note(
            f"ringfence: `{name}` is parked and waits for {' '.join(parked_for.split())}; "
            f"see: ringfence show {answer['id']}; still waiting for its end"
        )


def check_manifest(text: str, source: str) -> Manifest:
    """Check a manifest as the kernel will.

    Raises:
        ConsoleError: it has problems, one a line with line and column.
    """
    from ringfence.policy.manifest import parse_manifest  # noqa: PLC0415 - takes longer than most commands do altogether

    try:
        return parse_manifest(text, source)
    except ManifestError as error:
        raise ConsoleError(str(error), ExitCode.USAGE) from None


def _finish(answer: dict[str, Any], end: dict[str, Any]) -> int:
    state = str(end.get("state"))
    if state == "done":
        render.note(f"{answer.get('name') or answer['id']}: done")
        return ExitCode.OK
    why = end.get("error") or (f"exit code {end['exit_code']}" if end.get("exit_code") is not None else "")
    said = " ".join(str(why).split())
    text = f"`{answer.get('name') or answer['id']}` is {state}{': ' + said if said else ''}"
    raise ConsoleError(f"{text}; see: ringfence show {answer['id']}", ExitCode.UNWELL)


def _print_id(session: Session, answer: dict[str, Any]) -> None:
    if session.as_json:
        render.emit(answer)
    else:
        render.say(str(answer["id"]))
        sys.stdout.flush()


def read_text(name: str, what: str) -> str:
    """Read a small text file, or standard input for `-`.

    Raises:
        ConsoleError: it can't be read, is too large, or is not UTF-8.
    """
    data = _read(name, what, MANIFEST_BYTES_MAX)
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConsoleError(
            f"`{name}` is not UTF-8 text (byte {error.start + 1}); save the {what} as UTF-8", ExitCode.USAGE
        ) from None


def _read_input(name: str | None) -> bytes:
    return b"" if name is None else _read(name, "input", INPUT_BYTES_MAX)


def _read(name: str, what: str, limit: int) -> bytes:
    try:
        if name == "-":
            data = sys.stdin.buffer.read(limit + 1)
        else:
            with Path(name).open("rb") as file:
                data = file.read(limit + 1)
    except IsADirectoryError:
        raise ConsoleError(f"`{name}` is a directory; name a file in it", ExitCode.USAGE) from None
    except OSError as error:
        raise ConsoleError(
            f"`{name}` can't be read as {what}: {os_error_text(error)}; check the path", ExitCode.USAGE
        ) from None
    if len(data) > limit:
        raise ConsoleError(
            f"`{name}` is larger than {size(limit)}, the most for {what}; put large data in the workspace",
            ExitCode.USAGE,
        )
    return data


def _workspace(manifest: Manifest, source: str) -> Path | None:
    """Find the workspace: relative to the manifest, or to the current directory when that is piped in."""
    given = manifest.run.workspace
    if not given:
        return None
    base = Path() if source == "-" else Path(source).parent
    path = (base / given).absolute()
    if not path.is_dir():
        kind = "is not a directory" if path.exists() else "does not exist"
        raise ConsoleError(
            f"workspace `{given}` {kind} (looked at `{path}`); mend `spec.run.workspace` in the manifest",
            ExitCode.USAGE,
        )
    return path


def _upload(session: Session, header: dict[str, Any], workspace: Path | None) -> dict[str, Any]:
    with Progress("packing", shown=not session.as_json) as progress:

        def tell_left_out(name: str, kind: str) -> None:
            with progress.aside():
                render.note(f"ringfence: left `{name}` out of the workspace: a {kind} can't be part of it")

        def parts() -> Iterator[bytes]:
            if workspace is not None:
                if progress.shown:
                    progress.now("uploading", total=packed_bytes(workspace))
                yield from progress.counted(pack(workspace, left_out=tell_left_out))
            progress.now("starting")

        return session.client().submit(header, parts())
