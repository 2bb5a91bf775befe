"""`completion`: the script that teaches a shell this command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
from click.shell_completion import get_completion_class
from ringfence.console import render
from ringfence.console.errors import ConsoleError, ExitCode
from ringfence.console.session import Commands, Session

if TYPE_CHECKING:
    from click.shell_completion import ShellComplete

commands = Commands()

PROGRAMS = ("ringfence", "rf")
"""Names that the command line is installed under."""
_SHELLS = ("bash", "zsh", "fish")


@commands.add(
    "completion",
    'eval "$(ringfence completion bash)"',
    'eval "$(ringfence completion zsh)"',
    "ringfence completion fish | source",
)
@click.argument("shell", type=click.Choice(_SHELLS))
def completion(session: Session, shell: str) -> int:
    """Print the script that makes a shell complete what you type.

    Names of agents, approvals, points and grants come from the kernel, when one answers within a second.
    """
    script = "\n".join(_script(session.context.find_root().command, shell, name) for name in PROGRAMS)
    if session.as_json:
        render.emit({"shell": shell, "programs": list(PROGRAMS), "script": script})
    else:
        click.echo(script, nl=False)
    return ExitCode.OK


def _script(root: click.Command, shell: str, program: str) -> str:
    kind: type[ShellComplete] | None = get_completion_class(shell)
    if kind is None:
        raise ConsoleError(f"`{shell}` is no shell this version knows; it knows {', '.join(_SHELLS)}")
    # Not its `source()`: that runs bash to look at its version, which may not be installed here.
    made = kind(root, {}, program, f"_{program.upper()}_COMPLETE")
    return made.source_template % made.source_vars()
