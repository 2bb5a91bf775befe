"""A depot in a bucket of S3, or of whatever speaks its protocol: the only user of obstore. And what opens a depot by its URL."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast
from urllib.parse import parse_qsl, unquote, urlsplit

from ringfence.sandbox.depot import CHUNK, Depot, DepotError, DirectoryDepot, check_name, hash_of, pieces_of

if TYPE_CHECKING:
    from obstore.store import ClientConfig, RetryConfig, S3Config

REQUEST_S: Final = 30.0
"""Longest time of one request to a bucket."""

RETRY_S: Final = 20.0
"""How long a request that failed is tried again."""

_OPTIONS: Final = ("endpoint", "region", "path_style")


class BucketDepot:
    """A depot in a bucket. Credentials come from the environment: `AWS_ACCESS_KEY_ID`, or whatever role the machine has.

    Args:
        bucket: its name.
        prefix: beneath which everything lies; empty: the whole bucket.
        endpoint: URL of another server than Amazon's; empty: Amazon's.
        region: empty: as the environment says.
        path_style: whether the bucket stands in the path of URLs, and not in their host name.

    Raises:
        DepotError: obstore is not installed, or the settings are wrong.
    """

    def __init__(
        self, bucket: str, prefix: str = "", *, endpoint: str = "", region: str = "", path_style: bool = True
    ) -> None:
        try:
            import obstore  # noqa: PLC0415 - an extra: whoever has no bucket needs none of it
            from obstore.store import S3Store  # noqa: PLC0415
        except ImportError:
            raise DepotError(
                "a shared store in a bucket needs obstore: install it with `pip install ringfence[s3]`"
            ) from None
        self._obstore = obstore
        self.place = f"s3://{bucket}/{prefix}".rstrip("/")
        config: S3Config = {"virtual_hosted_style_request": not path_style}
        if endpoint:
            config["endpoint"] = endpoint
        if region:
            config["region"] = region
        client: ClientConfig = {
            "timeout": timedelta(seconds=REQUEST_S),
            "allow_http": endpoint.startswith("http://"),
        }
        retry: RetryConfig = {"max_retries": 4, "retry_timeout": timedelta(seconds=RETRY_S)}
        with self._named():
            self._store = S3Store(
                bucket, prefix=prefix or None, config=config, client_options=client, retry_config=retry
            )

    def put(self, name: str, source: bytes | Path) -> None:
        """Keep bytes, or a file's, under a name. Durable and read back on return."""
        check_name(name)
        with self._named():
            self._obstore.put(self._store, name, source)
        try:
            right = hash_of(pieces_of(source))
        except OSError as error:
            raise DepotError(f"what is to be kept in `{self.place}` can't be read: {error}") from error
        # Some servers show a name a moment before all of its bytes; what is there then is right, or never.
        if not any(
            found is not None and hash_of(found) == right for found in (self.chunks(name) for _ in range(2))
        ):
            raise DepotError(
                f"`{name}` in the shared store `{self.place}` reads back wrong; look at its server"
            )

    def chunks(self, name: str) -> Iterator[bytes] | None:
        """Read what was kept, in pieces; None where there is nothing of that name."""
        try:
            with self._named():
                found = self._obstore.get(self._store, check_name(name))
        except FileNotFoundError:
            return None

        def pieces() -> Iterator[bytes]:
            with self._named():
                for piece in found.stream(min_chunk_size=CHUNK):
                    yield bytes(piece)

        return pieces()

    def names(self, prefix: str) -> list[str]:
        """Names below a directory, sorted."""
        with self._named():
            # Its types name those of a library that is not needed here.
            pages = cast("Any", self._obstore).list(self._store, prefix=check_name(prefix))
            return sorted(str(one["path"]) for page in pages for one in page)

    def remove(self, names: Iterable[str]) -> None:
        """Forget names; those that are not there are passed over."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), self._named():
                self._obstore.delete(self._store, check_name(name))

    @contextlib.contextmanager
    def _named(self) -> Generator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except (self._obstore.exceptions.BaseError, OSError, ValueError) as error:
            lines = str(error).strip().splitlines() or [type(error).__name__]
            raise DepotError(
                f"the shared store `{self.place}` can't be used: {lines[0][:300]}; look at its server and the credentials"
            ) from error


def open_depot(url: str) -> Depot:
    """Open a depot: `file:///srv/shared` or a path, or `s3://BUCKET/PREFIX?endpoint=URL&region=NAME&path_style=false`.

    Raises:
        DepotError: the URL is none, or what it names is not there.
    """
    parts = urlsplit(url)
    if parts.scheme == "s3":
        options = dict(parse_qsl(parts.query, keep_blank_values=True))
        unknown = sorted(set(options) - set(_OPTIONS))
        if unknown or not parts.hostname or parts.username or parts.fragment:
            raise DepotError(
                f"`{url.partition('?')[0]}` is no shared store; write `s3://BUCKET/PREFIX?endpoint=URL&region=NAME`, "
                "with the credentials in AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            )
        return BucketDepot(
            parts.netloc,
            parts.path.strip("/"),
            endpoint=options.get("endpoint", ""),
            region=options.get("region", ""),
            path_style=options.get("path_style", "true") != "false",
        )
    path = unquote(parts.path) if parts.scheme == "file" else url
    if (parts.scheme == "file" and parts.netloc) or not path.startswith("/"):
        raise DepotError(
            f"`{url}` is no shared store; give an absolute directory, `file:///DIR` or `s3://BUCKET/PREFIX`"
        )
    return DirectoryDepot(Path(path))
