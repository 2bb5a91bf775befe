"""`rf.objects` for threads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ringfence.agent import object_operations as operations

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ringfence.agent.calls import Caller
    from ringfence.agent.kept import ObjectContent, ObjectInfo, ObjectStored
    from ringfence.agent.values import Found


class Objects:
    """Objects in declared buckets, named `NAME/KEY` after their resource."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def list(self, prefix: str, *, after: str = "", limit: int = 0) -> Found[ObjectInfo]:
        """List objects beneath a prefix; `.truncated` says whether there are more.

        Args:
            prefix: the resource, or `NAME/PREFIX` of whole components.
            after: only those whose name comes after this one.
            limit: most objects; 0: 1000.
        """
        return self._caller.run(operations.listed(prefix, after, limit))

    def get(self, name: str, *, offset: int = 0, limit: int = 0) -> ObjectContent:
        """Read an object: its bytes, with what is known of it as attributes.

        Args:
            name: `NAME/KEY`.
            offset: first byte.
            limit: most bytes; 0: all to the end.

        Raises:
            NoSuchResource: there is none.
            Conflict: it changed while it was read.
        """
        return self._caller.script(operations.get(name, offset, limit))

    def put(
        self,
        name: str,
        content: str | bytes,
        *,
        content_type: str = "",
        metadata: Mapping[str, str] | None = None,
        if_version: str = "",
    ) -> ObjectStored:
        """Make an object, or another content of it. What stood there is kept before, and a rollback brings it back.

        Args:
            name: `NAME/KEY`.
            content: bytes, or a text as UTF-8.
            content_type: empty: that of text or of bytes.
            metadata: by names in lower case; what stood there loses its own.
            if_version: version that has to stand there; empty: any, or none.

        Raises:
            Conflict: another version stands there.
            SnapshotFailed: what stands there can't be kept; nothing was changed.
        """
        return self._caller.run(operations.put(name, content, content_type, metadata, if_version))

    def delete(self, name: str, *, if_version: str = "") -> int:
        """Remove an object; gives the bytes it had. It is kept before, and a rollback brings it back.

        Args:
            name: `NAME/KEY`.
            if_version: version that has to stand there; empty: any.

        Raises:
            NoSuchResource: there is none.
            Conflict: another version stands there.
            SnapshotFailed: it can't be kept; nothing was changed.
        """
        return self._caller.run(operations.delete(name, if_version))
