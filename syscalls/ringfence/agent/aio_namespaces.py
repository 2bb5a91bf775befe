"""`rf.fs`, `rf.exec`, `rf.http` and `rf.sql` for asyncio.

Paths are relative to the workspace, or `/workspace/…`. Every method is one journaled call (to read a large
file: several) and raises the typed errors of `ringfence.agent`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.agent import operations, redirects, targets

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ringfence.agent.aio_calls import AsyncCaller
    from ringfence.agent.operations import StrPath
    from ringfence.agent.values import (
        Command,
        FileInfo,
        Found,
        Response,
        Rows,
        SearchMatch,
        SqlResult,
        Written,
    )


class AsyncFiles:
    """The live workspace."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def read_text(self, path: StrPath, encoding: str = "utf-8") -> str:
        """Read a whole file as text."""
        return (await self.read_bytes(path)).decode(encoding)

    async def read_bytes(self, path: StrPath, offset: int = 0, limit: int = 0) -> bytes:
        """Read a file from byte `offset`: `limit` bytes, or with 0 all to its end."""
        return await self._caller.script(operations.read_all(path, offset, limit))

    async def write_text(self, path: StrPath, text: str, encoding: str = "utf-8", mode: int = 0) -> Written:
        """Replace or create a file; missing directories are created. `mode` is for a new file; 0: 0644."""
        return await self.write_bytes(path, text.encode(encoding), mode)

    async def write_bytes(self, path: StrPath, data: bytes, mode: int = 0) -> Written:
        """Replace or create a file; missing directories are created. `mode` is for a new file; 0: 0644."""
        return await self._caller.run(operations.fs_write(path, data, mode))

    async def append_text(self, path: StrPath, text: str, encoding: str = "utf-8") -> Written:
        """Add to the end of a file, or create it."""
        return await self.append_bytes(path, text.encode(encoding))

    async def append_bytes(self, path: StrPath, data: bytes) -> Written:
        """Add to the end of a file, or create it."""
        return await self._caller.run(operations.fs_append(path, data))

    async def list(self, path: StrPath = operations.WORKSPACE) -> Found[FileInfo]:
        """List a directory in name order; `.withheld` counts what policy hides."""
        return await self._caller.run(operations.fs_list(path))

    async def stat(self, path: StrPath) -> FileInfo:
        """Describe one path; a link is described, not followed."""
        return await self._caller.run(operations.fs_stat(path))

    async def search(
        self, path: StrPath = operations.WORKSPACE, glob: str = "", text: str = "", limit: int = 0
    ) -> Found[SearchMatch]:
        """Find files below a directory whose path matches `glob` and lines that contain `text`; empty: all.

        `.withheld` counts paths that policy hides; `.truncated` says whether `limit` cut the list (0: the
        kernel's).
        """
        return await self._caller.run(operations.fs_search(path, glob, text, limit))

    async def move(self, path: StrPath, to: StrPath) -> str:
        """Rename to a path that must not exist; gives the new absolute path."""
        return await self._caller.run(operations.fs_move(path, to))

    async def delete(self, path: StrPath, recursive: bool = False) -> int:
        """Remove a file, or with `recursive` a directory and all beneath it; gives how many entries went."""
        return await self._caller.run(operations.fs_delete(path, recursive))


class AsyncExec:
    """Commands."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def run(
        self,
        argv: Sequence[StrPath],
        *,
        cwd: StrPath = "",
        env: Mapping[str, str] | None = None,
        stdin: str | bytes = b"",
        timeout: float | None = None,  # noqa: ASYNC109 - the command's, kept by the kernel
        check: bool = False,
    ) -> Command:
        """Run a command on an overlay of the workspace; its changes count all together or not at all.

        Args:
            argv: program and arguments; no shell reads them.
            cwd: directory in the workspace; empty: /workspace.
            env: more environment.
            stdin: its standard input.
            timeout: longest run in seconds; None: the kernel's limit.
            check: raise `CommandFailed` where it doesn't exit with 0.
        """
        operation = targets.exec_run(argv, cwd=cwd, env=env, stdin=stdin, timeout=timeout)
        command = await self._caller.run(operation)
        if check:
            targets.require_success(argv, command)
        return command


class AsyncHttp:
    """HTTP requests to declared resources. Credentials are added by the kernel.

    With `follow=N` up to N redirects are followed, each as a call of its own that policy decides: 303, and 301 and 302 of a POST, by
    a GET without body, 307 and 308 by the same request, 301 and 302 of a GET or HEAD too. Headers go to another origin never. What
    isn't followed is the answer, a 3xx with its `location`.
    """

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def get(self, url: str, *, headers: Mapping[str, str] | None = None, follow: int = 0) -> Response:
        """Fetch."""
        return await self._caller.script(redirects.follow("get", url, follow, headers=headers))

    async def head(self, url: str, *, headers: Mapping[str, str] | None = None, follow: int = 0) -> Response:
        """Fetch the headers only."""
        return await self._caller.script(redirects.follow("head", url, follow, headers=headers))

    async def post(
        self,
        url: str,
        json: Any = None,
        data: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        follow: int = 0,
    ) -> Response:
        """Send a POST with `json` or `data` as its body."""
        return await self._caller.script(
            redirects.follow("post", url, follow, json=json, data=data, headers=headers)
        )

    async def put(
        self,
        url: str,
        json: Any = None,
        data: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        follow: int = 0,
    ) -> Response:
        """Send a PUT with `json` or `data` as its body."""
        return await self._caller.script(
            redirects.follow("put", url, follow, json=json, data=data, headers=headers)
        )

    async def patch(
        self,
        url: str,
        json: Any = None,
        data: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        follow: int = 0,
    ) -> Response:
        """Send a PATCH with `json` or `data` as its body."""
        return await self._caller.script(
            redirects.follow("patch", url, follow, json=json, data=data, headers=headers)
        )

    async def delete(
        self,
        url: str,
        json: Any = None,
        data: str | bytes | None = None,
        headers: Mapping[str, str] | None = None,
        follow: int = 0,
    ) -> Response:
        """Send a DELETE, with `json` or `data` as its body where one is given."""
        return await self._caller.script(
            redirects.follow("delete", url, follow, json=json, data=data, headers=headers)
        )


class AsyncSql:
    """Declared databases."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def query(
        self, database: str, statement: str, params: Sequence[Any] = (), *, limit: int = 0
    ) -> Rows:
        """Run one reading statement, `%s` for parameters; `.truncated` says whether a limit cut the rows."""
        return await self._caller.run(targets.sql_query(database, statement, params, limit))

    async def execute(self, database: str, statement: str, params: Sequence[Any] = ()) -> SqlResult:
        """Run one changing statement, `%s` for parameters, behind a point that can bring rows back."""
        return await self._caller.run(targets.sql_execute(database, statement, params))
