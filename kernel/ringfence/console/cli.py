"""The command line: `ringfence`, short `rf`."""

from __future__ import annotations

import io
import os
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click
from ringfence.console import (
    commands_a2a,
    commands_agents,
    commands_approvals,
    commands_audit,
    commands_budget,
    commands_completion,
    commands_console,
    commands_doctor,
    commands_elsewhere,
    commands_family,
    commands_image,
    commands_kernel,
    commands_mcp,
    commands_messages,
    commands_move,
    commands_output,
    commands_policy,
    commands_prune,
    commands_rights,
    commands_schedule,
    commands_secrets,
    commands_submit,
    commands_top,
    commands_undo,
    completion,
)
from ringfence.console.errors import ConsoleError, ExitCode, ReaderGone
from ringfence.console.guard import Guard
from ringfence.console.session import Branch, global_options
from ringfence.kernel.config import GRPC_ENVIRONMENT, VERSION

if TYPE_CHECKING:
    from collections.abc import Sequence

_SECTIONS: dict[str, tuple[str, ...]] = {
    "The kernel": ("up", "down", "status", "doctor", "reload", "secrets", "mcp", "a2a", "image"),
    "Agents": (
        "submit",
        "ps",
        "tree",
        "top",
        "show",
        "logs",
        "steps",
        "pause",
        "resume",
        "start",
        "kill",
        "rm",
        "layers",
        "export",
        "import",
        "send",
        "pull",
        "schedule",
    ),
    "What they may do": ("budget", "grant", "revoke", "approvals", "policy"),
    "Undo and settle": ("points", "rollback", "fork", "diff", "resolve"),
    "Evidence": ("audit", "prune", "demo"),
    "Sandboxes elsewhere": ("sandbox-host", "sandbox-certs"),
    "This command line": ("console", "completion"),
}
_HELP = """Run agents in sandboxes behind a policy-checked, journaled, reversible syscall layer.

A first run: `ringfence up --detach`, `ringfence submit agent.yaml --wait`, `ringfence steps AGENT`.
Every command takes --json; exit codes are in docs/commands.md."""


class Root(click.Group):
    """The root command. However it ends: a code of the contract, and an error is a line on standard error."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        windows_expand_args: bool = True,
        **extra: Any,
    ) -> NoReturn:
        """Run a command line and exit the process with its code."""
        del standalone_mode, windows_expand_args
        with Guard() as guard:
            given = list(sys.argv[1:] if args is None else args) or ["--help"]
            _check_text([*given, os.environ.get("RINGFENCE_DATA", "")])
            code = super().main(given, prog_name, complete_var, standalone_mode=False, **extra)
            guard.code = code if isinstance(code, int) else 0
            sys.stdout.flush()
        sys.exit(guard.code)

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command; click has an exit code of its own for a broken pipe, so it never sees one."""
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands by what they are for."""
        for title, names in _SECTIONS.items():
            found = [(name, self.get_command(ctx, name)) for name in names]
            with formatter.section(title):
                formatter.write_dl(
                    [(name, command.get_short_help_str(66)) for name, command in found if command]
                )


def build() -> Root:
    """Put the command tree together."""
    tree = Root(
        "ringfence",
        help=_HELP,
        params=global_options(envvar="RINGFENCE_DATA"),
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
        no_args_is_help=False,
    )
    tree = click.version_option(VERSION, prog_name="ringfence", message="%(prog)s %(version)s")(tree)
    for module in (
        commands_kernel,
        commands_doctor,
        commands_elsewhere,
        commands_submit,
        commands_agents,
        commands_family,
        commands_top,
        commands_console,
        commands_output,
        commands_messages,
        commands_budget,
        commands_rights,
        commands_undo,
        commands_move,
        commands_audit,
        commands_prune,
        commands_completion,
    ):
        module.commands.attach(tree)
    policy = Branch("policy", about="Check manifests; ask what a call would get, and why.")
    commands_policy.commands.attach(policy)
    tree.add_command(policy)
    approvals = Branch("approvals", about="The inbox of parked calls that wait for a person.", default="ls")
    commands_approvals.commands.attach(approvals)
    tree.add_command(approvals)
    image = Branch("image", about="The image of docker sandboxes.")
    commands_image.commands.attach(image)
    tree.add_command(image)
    secrets = Branch("secrets", about="Values kept by the kernel: never shown, never inside a sandbox.")
    commands_secrets.commands.attach(secrets)
    tree.add_command(secrets)
    mcp = Branch("mcp", about="Declared MCP servers, and their tools as they were taken.")
    commands_mcp.commands.attach(mcp)
    tree.add_command(mcp)
    a2a = Branch("a2a", about="Declared agents elsewhere, and their cards as they were taken.")
    commands_a2a.commands.attach(a2a)
    tree.add_command(a2a)
    schedule = Branch("schedule", about="When agents run by themselves.")
    commands_schedule.commands.attach(schedule)
    tree.add_command(schedule)
    completion.teach(tree)
    return tree


root = build()


def main() -> NoReturn:
    """Entry point of `ringfence` and `rf`."""
    # gRPC reads these when it is first imported.
    for name, value in GRPC_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    _stand_in()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that can't show a letter is no reason to fail.
            stream.reconfigure(errors="backslashreplace")
    root.main()


def _check_text(words: Sequence[str]) -> None:
    """Refuse what no message to the kernel can hold, once for all commands."""
    for word in words:
        try:
            word.encode()
        except UnicodeEncodeError:
            shown = os.fsencode(word).decode(errors="backslashreplace")
            raise ConsoleError(
                f"`{shown}` is not UTF-8 text; give names, paths and texts in UTF-8", ExitCode.USAGE
            ) from None


def _stand_in() -> None:
    """Put the null device where the caller closed a standard stream.

    Else the next file or socket would get its number, and be read from or written to as if it were it.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            nowhere = os.open(os.devnull, os.O_RDWR)
            setattr(sys, name, os.fdopen(nowhere, "w" if number else "r", encoding="utf-8"))
