"""Objects in a bucket of S3, or of whatever speaks its protocol.

The client follows the kernel's declaration alone: credentials never come from the environment, and a request that changes
something is not repeated by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncIterator, Generator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, BinaryIO, Final, cast

from ringfence.syscalls.drivers.protocol import (
    ABSENT,
    Changed,
    DriverError,
    Listed,
    Objects,
    Options,
    Page,
    Stat,
)
from ringfence.syscalls.drivers.registry import BadOptions

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

OPTIONS: Final = {
    "bucket": str,
    "endpoint": str,
    "region": str,
    "path_style": bool,
    "access_key": str,
    "secret_key": str,
    "timeout_s": int,
}
REQUIRED: Final = ("bucket", "access_key", "secret_key")
PIECE_BYTES: Final = 1 << 20
PART_BYTES: Final = 8 << 20
"""Parts of a large object; at most two are in memory."""

AT_ONCE_BYTES: Final = 8 << 20
"""Up to here an object is written by one request, which is conditional where the server knows that."""


class S3Objects(Objects):
    """A driver for one bucket.

    Args:
        options: `bucket`, `access_key`, `secret_key`; `endpoint`, `region` (`us-east-1`), `path_style` (true), `timeout_s` (30).

    Raises:
        BadOptions: obstore is not installed, or an option is wrong.
    """

    def __init__(self, options: Options) -> None:
        checked = _checked(options)
        try:
            import obstore  # noqa: PLC0415 - an extra: whoever has no bucket needs none of it
            from obstore.store import S3Store  # noqa: PLC0415
        except ImportError:
            raise BadOptions(
                "the driver `s3` needs obstore: install it with `pip install ringfence[s3]`"
            ) from None
        self._obstore: Any = obstore
        self.place = f"s3://{checked['bucket']}"
        endpoint = str(checked.get("endpoint", ""))
        self.identity = hashlib.sha256(f"{endpoint.rstrip('/')}\n{checked['bucket']}".encode()).hexdigest()
        config: S3Config = {
            "virtual_hosted_style_request": not checked.get("path_style", True),
            "region": str(checked.get("region", "us-east-1")),
        }
        if endpoint:
            config["endpoint"] = endpoint
        keys = {
            "access_key_id": str(checked["access_key"]),
            "secret_access_key": str(checked["secret_key"]),
            "token": None,
            "expires_at": None,
        }
        client: ClientConfig = {
            # A large object takes longer than one answer may: what has to come in time is the next part of it.
            "timeout": timedelta(hours=6),
            "read_timeout": timedelta(seconds=int(checked.get("timeout_s", 30))),
            "connect_timeout": timedelta(seconds=10),
            "allow_http": endpoint.startswith("http://"),
        }
        # INVARIANT: what changes something is sent once: a repeat could overwrite what others did in between.
        retry: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}
        make = cast("Any", S3Store)
        try:
            self._store: Any = make(
                str(checked["bucket"]),
                config=config,
                client_options=client,
                retry_config=retry,
                credential_provider=lambda: keys,
            )
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise BadOptions(f"the options of `{self.place}` can't be used: {_line(error)}") from None

    async def describe(self, key: str) -> Stat | None:
        """How an object stands, by one HEAD."""
        with self._named(key, changes=False):
            try:
                found = await self._obstore.get_async(self._store, key, options={"head": True})
            except FileNotFoundError:
                return None
            meta: Mapping[str, Any] = found.meta
            return Stat(
                size=int(meta["size"]),
                version=_version(meta),
                attributes={str(name): str(value) for name, value in dict(found.attributes).items()},
                modified_us=int(meta["last_modified"].timestamp() * 1e6),
            )

    async def list(self, prefix: str, after: str, limit: int) -> Page:
        """A part of the list."""
        found: list[Listed] = []
        with self._named(prefix, changes=False):
            pages = self._obstore.list(
                self._store,
                prefix=prefix.rstrip("/") or None,
                offset=after or None,
                chunk_size=min(limit + 1, 1000),
            )
            async for page in pages:
                for one in page:
                    key = str(one["path"])
                    if not key.startswith(prefix) or key <= after:
                        continue
                    if len(found) == limit:
                        return Page(objects=tuple(found), more=True)
                    found.append(
                        Listed(
                            key=key,
                            size=int(one["size"]),
                            version=_version(one),
                            modified_us=int(one["last_modified"].timestamp() * 1e6),
                        )
                    )
        return Page(objects=tuple(found))

    async def read(self, key: str, version: str, start: int, length: int) -> AsyncIterator[bytes]:
        """A part of an object, of this version alone."""
        if length <= 0:
            return
        with self._named(key, changes=False):
            try:
                options = {"range": (start, start + length), "if_match": version}
                found = await self._obstore.get_async(self._store, key, options=options)
            except FileNotFoundError:
                raise Changed(f"`{key}` is gone by now") from None
            if _version(found.meta) != version:
                raise Changed(f"`{key}` has another version by now")
            async for piece in found.stream(min_chunk_size=PIECE_BYTES):
                yield bytes(piece)

    async def write(
        self, key: str, content: BinaryIO, size: int, attributes: Mapping[str, str], expect: str
    ) -> str:
        """Write an object: a small one by one request, a large one in parts that count only when all are there."""
        await self._require(key, expect)
        with self._named(key, changes=True):
            small = size <= AT_ONCE_BYTES
            mode: Any = "create" if expect == ABSENT else {"e_tag": expect}
            done = await self._obstore.put_async(
                self._store,
                key,
                content.read(size) if small else content,
                attributes=dict(attributes) or None,
                use_multipart=not small,
                chunk_size=PART_BYTES,
                max_concurrency=1,
                # In parts no server takes a condition: there the look right before has to do.
                **({"mode": mode} if small else {}),
            )
            return _version(done)

    async def remove(self, key: str, expect: str) -> None:
        """Remove an object; no server takes a condition here, so it is looked at right before."""
        await self._require(key, expect)
        with self._named(key, changes=True):
            await self._obstore.delete_async(self._store, key)

    async def _require(self, key: str, expect: str) -> None:
        now = await self.describe(key)
        if (ABSENT if now is None else now.version) != expect:
            raise Changed(f"`{key}` has another version by now" if now else f"`{key}` is gone by now")

    @contextlib.contextmanager
    def _named(self, key: str, *, changes: bool) -> Generator[None]:
        """Turn the client's errors into the protocol's; what may have been carried out says so."""
        errors = self._obstore.exceptions
        try:
            yield
        except DriverError:
            raise
        except (errors.PreconditionError, errors.AlreadyExistsError):
            raise Changed(f"`{key}` has another version by now") from None
        except (errors.PermissionDeniedError, errors.UnauthenticatedError) as error:
            raise DriverError(f"`{self.place}` refuses it: {_line(error)}") from None
        except FileNotFoundError:
            raise DriverError(f"`{self.place}` has no such bucket or object") from None
        except (errors.BaseError, OSError, ValueError, TimeoutError) as error:
            refused = isinstance(error, errors.InvalidPathError | errors.NotSupportedError)
            raise DriverError(
                f"`{self.place}` can't be used: {_line(error)}", sent=changes and not refused
            ) from None


def _checked(options: Options) -> Options:
    for name, value in options.items():
        if name not in OPTIONS:
            raise BadOptions(f"the driver `s3` has no option `{name}`; it has: {', '.join(OPTIONS)}")
        if type(value) is not OPTIONS[name] or value == "":
            raise BadOptions(f"the option `{name}` of the driver `s3` has to be a {OPTIONS[name].__name__}")
    missing = [name for name in REQUIRED if name not in options]
    if missing:
        raise BadOptions(f"the driver `s3` needs the option `{missing[0]}`")
    return options


def _version(meta: Mapping[str, Any]) -> str:
    found = meta.get("e_tag") or meta.get("version")
    if not found:
        raise DriverError("the server gives objects no ETag, so what others do there can't be told")
    return str(found)


def _line(error: BaseException) -> str:
    """What went wrong, on one line; behind the first line stands what was sent."""
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return text.partition(": <?xml")[0][:200]
