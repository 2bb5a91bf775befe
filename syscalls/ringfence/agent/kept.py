"""What calls on messages, memory, artifacts and objects return."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Mapping
    from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One message as it was taken out of the mailbox.

    Attributes:
        id: of the message.
        sender: id of the agent that sent it, or `operator:NAME`.
        sender_name: its name, or `operator`.
        text: the text; None where it was sent as JSON.
        json: the JSON value; None where it was sent as text.
        sent_at: when it was sent, UTC.
    """

    id: str
    sender: str
    sender_name: str
    text: str | None
    json: Any
    sent_at: datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One entry of a memory.

    Attributes:
        id: of the entry.
        text: what was kept.
        tags: its tags.
        metadata: the mapping it was kept with.
        score: how well it fits the query; 0 without one.
        created_at: when it was kept, UTC.
        agent: id of the agent that kept it.
    """

    id: str
    text: str
    tags: tuple[str, ...]
    metadata: Mapping[str, Any]
    score: float
    created_at: datetime
    agent: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """Where an artifact was put: its reference, its version under the name, its size in bytes."""

    ref: str
    version: int
    size_bytes: int


class Content(bytes):
    """The bytes of an artifact, or of a part of it.

    Attributes:
        name: name it was put under.
        version: version under this name.
        ref: SHA-256 of the whole, in hex.
        media_type: as it was put.
        size_bytes: size of the whole.
    """

    name: str
    version: int
    ref: str
    media_type: str
    size_bytes: int

    @classmethod
    def of(cls, data: bytes, *, name: str, version: int, ref: str, media_type: str, size_bytes: int) -> Self:
        """Make one."""
        content = cls(data)
        content.name, content.version, content.ref = name, version, ref
        content.media_type, content.size_bytes = media_type, size_bytes
        return content

    @property
    def text(self) -> str:
        """The bytes as UTF-8; what isn't shows as `�`."""
        return self.decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectInfo:
    """One object of a list.

    Attributes:
        object: its name, `NAME/KEY`.
        size_bytes: its size.
        version: changes whenever its content does.
        modified_at: when it was changed last, UTC; None: not known.
    """

    object: str
    size_bytes: int
    version: str
    modified_at: datetime | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectStored:
    """How an object was written: its version, its size in bytes, and whether nothing stood there before."""

    version: str
    size_bytes: int
    created: bool


class ObjectContent(bytes):
    """The bytes of an object, or of a part of it.

    Attributes:
        version: of the object.
        size_bytes: size of the whole.
        content_type: its content type.
        metadata: what else belongs to it, by name.
    """

    version: str
    size_bytes: int
    content_type: str
    metadata: Mapping[str, str]

    @classmethod
    def of(
        cls, data: bytes, *, version: str, size_bytes: int, content_type: str, metadata: Mapping[str, str]
    ) -> Self:
        """Make one."""
        content = cls(data)
        content.version, content.size_bytes = version, size_bytes
        content.content_type, content.metadata = content_type, metadata
        return content

    def with_data(self, data: bytes) -> Self:
        """The same object with more of its bytes."""
        return self.of(
            data,
            version=self.version,
            size_bytes=self.size_bytes,
            content_type=self.content_type,
            metadata=self.metadata,
        )

    @property
    def text(self) -> str:
        """The bytes as UTF-8; what isn't shows as `�`."""
        return self.decode(errors="replace")
