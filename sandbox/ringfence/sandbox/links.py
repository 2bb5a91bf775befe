"""Following links inside a workspace, one component at a time, none out of it, and none to a second spelling."""

from __future__ import annotations

import errno
import stat

from ringfence.sandbox.names import WORKSPACE, BadNameError, normalise, other_form, shown
from ringfence.sandbox.records import WorkspaceError, workspace_error
from ringfence.sandbox.tree import Tree

_LINKS = 40  # most links in one path, as the operating system counts


def resolve(tree: Tree, lexical: str, *, follow: bool) -> str:
    """Give the path that a lexical path names once its links are followed. What was asked for need not exist.

    Args:
        tree: the workspace.
        lexical: as `names.normalise` gives it.
        follow: whether a link as the last component is followed too.

    Raises:
        WorkspaceError: a link leads outside, to nothing, or in a circle.
    """
    done: list[str] = []
    todo = lexical.split("/")[:1:-1]
    asked = len(todo)  # so many at the bottom were asked for; what lies above them was written in a link
    links = 0
    directory = True  # whether what was found so far is one
    while todo:
        name = todo.pop()
        written = len(todo) >= asked
        asked = min(asked, len(todo))
        if name in {".", ".."}:
            _step(done, name, lexical, directory=directory)
            continue
        here = "/".join([WORKSPACE, *done, name])
        mode, target = _look(tree, here, lexical)
        if not mode:
            if written:
                raise WorkspaceError("InvalidRequest", _dangles(lexical, here))
            return "/".join([here, *todo[::-1]])
        if target is None or (not follow and not todo):
            done.append(name)
            directory = stat.S_ISDIR(mode)
            continue
        links += 1
        if links > _LINKS:
            raise WorkspaceError(
                "InvalidRequest", f"`{shown(lexical)}` is a loop of links; remove one of them"
            )
        if target.startswith("/"):
            done.clear()
        todo.extend(reversed(_parts(target, lexical)))
    return "/".join([WORKSPACE, *done])


def _step(done: list[str], name: str, lexical: str, *, directory: bool) -> None:
    """Take `.` or `..` of a link: what stands before it has to be a directory, and not the workspace for `..`."""
    if not directory:
        raise workspace_error(OSError(errno.ENOTDIR, ""), lexical)
    if name == ".." and not done:
        raise WorkspaceError("InvalidRequest", _leaves(lexical))
    if name == "..":
        done.pop()


def _look(tree: Tree, path: str, lexical: str) -> tuple[int, str | None]:
    """Mode of what stands there, 0 for nothing, and where it points if it is a link."""
    try:
        facts = tree.lstat(path)
        return facts.st_mode, tree.readlink(path) if stat.S_ISLNK(facts.st_mode) else None
    except OSError as error:
        if error.errno in {errno.ENOENT, errno.ENOTDIR, errno.EACCES}:
            return 0, None
        raise workspace_error(error, lexical) from error


def _parts(target: str, lexical: str) -> list[str]:
    """Components that a link stands for; those of an absolute one count from the workspace.

    A slash or dot at the end stays, as `.`: what stands before it has to be a directory.
    """
    parts = [part for part in target.split("/") if part not in {"", "."}]
    if target.endswith(("/", "/.")):
        parts.append(".")
    if not target.startswith("/"):
        return parts
    if parts[:1] != ["workspace"]:
        raise WorkspaceError("InvalidRequest", _leaves(lexical))
    return parts[1:]


def _leaves(path: str) -> str:
    return f"`{shown(path)}` leads out of /workspace through a link; name a path inside"


def _dangles(path: str, target: str) -> str:
    return f"`{shown(path)}` is a link to `{shown(target)}`, which does not exist; name that path itself"


def same_spelling(path: str) -> str:
    """Give a resolved path back, or refuse a link to a name that could not have been asked for.

    Raises:
        BadNameError: it would be a second spelling for policy.
    """
    if normalise(path) != path:
        raise BadNameError(other_form(path))
    return path


def check_spelling(tree: Tree, path: str, lexical: str) -> None:
    """Refuse a requested path of which a name stands on the disk in a form that requests are not compared in.

    Where it stands in the other form as well, what was asked for is still not what would be found. A directory on the
    way counts as what it leads to does.

    Args:
        tree: the workspace.
        path: as it was requested.
        lexical: what `names.normalise` made of it.

    Raises:
        BadNameError: something stands there in exactly the requested form.
        WorkspaceError: a link on the way leads outside, to nothing, or in a circle.
    """
    if path.isascii():
        return
    asked = [part for part in path.split("/") if part not in {"", "."}]
    taken = lexical.split("/")[2:]
    if path.startswith("/"):
        del asked[0]
    for count, name in enumerate(asked):
        if name == taken[count]:
            continue
        # INVARIANT: no earlier name stands in the requested form, so only the other form of what is above leads here.
        above = resolve(tree, "/".join([WORKSPACE, *taken[:count]]), follow=True)
        try:
            found = tree.find(f"{above}/{name}")
        except (
            OSError
        ):  # too long a name in that form, or behind bits that hide it: nothing there can be meant
            continue
        if found is not None:
            raise BadNameError(other_form(path))
