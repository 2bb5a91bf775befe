"""In which form the walls stand that have several, strongest first; and that a demanded one does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ringfence.sandbox.native.job import Refused

FORMS = {
    "files": ("landlock", "mounts"),
    "memory": ("cgroup-v2", "cgroup-v1", "measured"),
    "pids": ("cgroup-v2", "cgroup-v1", "rlimit"),
    "cpu": ("cgroup-v2", "cgroup-v1", "shared"),
    "pause": ("cgroup-v2", "cgroup-v1", "signals"),
    "uid": ("own", "sub", "namespace"),
}
"""Forms that a default sandbox accepts; a manifest may demand a stronger one."""

GROUP_OF = {"memory": "memory", "pids": "pids", "cpu": "cpu", "pause": "freezer"}
"""The control group controller that holds a wall in its strongest form."""

ALWAYS = ("architecture", "namespaces", "read-only image", "overlay", "no_new_privs", "seccomp")
"""Walls without which no sandbox starts; they have one form each."""

USER_NAMESPACES = "user namespaces"
"""One more of them, where the kernel is an ordinary user's."""

GROUP_FIX = "run the kernel as root, or under systemd with `Delegate=yes`"
FIXES = {
    "files": "boot with `lsm=landlock,…` on Linux 5.13 or newer",
    **dict.fromkeys(GROUP_OF, GROUP_FIX),
    "uid": (
        "run the kernel as root; or, for sub-uids, install newuidmap and newgidmap (Debian's package `uidmap`) and give the "
        "kernel's user ranges (`usermod --add-subuids FIRST-LAST --add-subgids FIRST-LAST NAME`)"
    ),
}
"""What to do for the strongest form."""


def held(groups: Mapping[str, tuple[str, int]], *, landlock: int, uid: str) -> dict[str, str]:
    """The form of each wall around one sandbox.

    Args:
        groups: as `Groups.where`.
        landlock: the ABI, 0 for none.
        uid: the form of `uid`.
    """
    forms = {"files": "landlock" if landlock else "mounts", "uid": uid}
    for wall, controller in GROUP_OF.items():
        forms[wall] = f"cgroup-v{groups[controller][1]}" if controller in groups else FORMS[wall][-1]
    return {wall: forms[wall] for wall in FORMS}


def demand(wanted: Sequence[str], forms: Mapping[str, str], *, user_namespaces: bool) -> None:
    """See that what was demanded stands.

    Args:
        wanted: names of walls, or `NAME:FORM`.
        forms: as `held` answers.
        user_namespaces: whether the sandbox is in one.

    Raises:
        Refused: it names the wall and the fix.
    """
    always = (*ALWAYS, USER_NAMESPACES) if user_namespaces else ALWAYS
    for text in wanted:
        wall, colon, form = text.partition(":")
        if text == "all":
            continue  # every wall stands in a form that is accepted, or nothing starts
        if wall in forms and bool(colon) == bool(form):
            if form and forms[wall] != form and not forms[wall].startswith(f"{form}-"):
                raise Refused(
                    f"the wall `{wall}` stands as `{forms[wall]}` here, and `{form}` is required; {FIXES[wall]}"
                )
        elif text not in always:
            known = ", ".join([*always, *FORMS])
            raise Refused(f"the native sandbox has no wall `{text}`; it has: {known}")
