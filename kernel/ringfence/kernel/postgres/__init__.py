"""The embedded PostgreSQL server: its binaries, its directory, its process, its supervisor."""

from ringfence.kernel.postgres.errors import PostgresError
from ringfence.kernel.postgres.server import EmbeddedPostgres

__all__ = ["EmbeddedPostgres", "PostgresError"]
