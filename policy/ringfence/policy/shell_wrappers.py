"""Programs that run what follows their options."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

WRAPPERS: Final[Mapping[str, int]] = {
    **dict.fromkeys(
        ("env", "nice", "nohup", "setsid", "stdbuf", "ionice", "time", "sudo", "doas", "command"), 0
    ),
    **dict.fromkeys(
        ("exec", "builtin", "busybox", "toybox", "unshare", "nsenter", "strace", "ltrace", "watch"), 0
    ),
    **dict.fromkeys(("prlimit", "pkexec", "systemd-run", "systemd-inhibit", "dbus-run-session"), 0),
    **dict.fromkeys(("fakeroot", "eatmydata", "setarch", "linux32", "linux64", "x86_64", "i386"), 0),
    **dict.fromkeys(("unbuffer", "rlwrap", "valgrind", "gdb", "numactl"), 0),
    **dict.fromkeys(("chpst", "start-stop-daemon", "cpulimit", "tini", "dumb-init"), 0),
    **dict.fromkeys(("choom", "ssh-agent", "uclampset", "pipesz", "sem", "torsocks", "proxychains"), 0),
    **dict.fromkeys(
        ("timeout", "chroot", "flock", "taskset", "chrt", "runuser", "su", "script", "setpriv", "gosu"), 1
    ),
    "faketime": 1,
}
"""After how many words of their own, options apart."""

SHELLS: Final = frozenset(("sh", "bash", "dash", "ash", "zsh", "ksh", "mksh", "rbash"))
# Their language is another one, so what they run is not followed.
FOREIGN_SHELLS: Final = frozenset(("csh", "tcsh", "fish", "pwsh", "nu", "elvish", "xonsh"))
LOADERS: Final = re.compile(r"ld(?:-linux.*|-musl.*)?\.so(?:\.\d+)?|ld-\d.*\.so")
SHELL_VALUES: Final = frozenset(("--rcfile", "--init-file"))
ASKS_ABOUT: Final = frozenset(("--version", "--help"))
SCRIPT_OPTIONS: Final = frozenset(("su", "script", "flock", "runuser"))
FIND_EXEC: Final = frozenset(("-exec", "-execdir", "-ok", "-okdir"))
FIND_END: Final = frozenset((";", "+"))
# Wrappers behind which a command may begin in another directory; `env` with an option only.
ELSEWHERE: Final = frozenset(
    ("chroot", "su", "sudo", "doas", "runuser", "pkexec", "nsenter", "unshare", "systemd-run", "chpst")
) | {"start-stop-daemon"}
CHDIR: Final = ("-C", "--chdir")
