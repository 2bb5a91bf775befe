"""A world like those in which the accidents happened: a database, a platform's API, files; and what `policy explain` said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
from ringfence.kernel.postgres import EmbeddedPostgres
from support.scenes import Held, Scene, scene_on, short_directory
from support.target import Target

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    shop: {type: postgres, embedded: true, environment: prod}
    platform: {type: http, base: "%(base)s/v1", environment: prod, effects: {"DELETE /**": destroy}}
    mail: {type: http, base: "%(base)s/mail"}
    wiki: {type: http, base: "%(base)s/wiki"}
  ceilings: {%(ceilings)s}
  roles:
    operator: {allow: [{http.*: "%(base)s/**"}, {fs.*: "/workspace/**"}]}
"""


class World:
    """A kernel with its resources."""

    def __init__(self, scene: Scene, target: Target) -> None:
        self.scene, self.target = scene, target

    @property
    def base(self) -> str:
        return self.target.base

    def delivered(self, path: str | None = None) -> int:
        return len(self.target.deliveries(path))

    def shop(self) -> psycopg.Connection[Any]:
        """A connection of our own to the database, beside the kernel's."""
        return psycopg.connect(EmbeddedPostgres(self.scene.kernel.data).dsn("shop", "shop"), autocommit=True)

    def rows(self, table: str) -> list[tuple[Any, ...]]:
        with self.shop() as connection:
            return connection.execute(f"select * from {table} order by 1").fetchall()

    def ceilings(self, text: str) -> None:
        """The operator changes the ceilings and reloads."""
        config = self.scene.kernel.config
        config.write_text(CONFIG % {"base": self.base, "ceilings": text})
        self.scene.operator.ask("Reload")


@contextlib.contextmanager
def world() -> Iterator[World]:
    with short_directory() as directory:
        target = Target(Path(directory) / "deliveries")
        try:
            with scene_on(None, config=CONFIG % {"base": target.base, "ceilings": ""}) as scene:
                yield World(scene, target)
        finally:
            target.close()


def explained(held: Held, step: int = -1) -> tuple[str, list[str], str]:
    """What `policy explain` says of a step: verdict, texts of the rules, reason."""
    number = held.steps()[step]["step"]
    told = held.operator.ask("PolicyExplain", agent=held.id, step=number)
    return told["verdict"], [rule["text"] for rule in told["rules"]], told["reason"]


def names_of(live: Path) -> dict[str, bytes]:
    """Every file of a workspace with its content."""
    return {str(p.relative_to(live)): p.read_bytes() for p in sorted(live.rglob("*")) if p.is_file()}
