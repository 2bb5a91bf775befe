"""Public accidents with files and rows, acted out on our own: each ends in the right verdict, and `policy explain` names the rule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import CommandFailed, Conflict, Denied, InvalidRequest, RingfenceError, SnapshotFailed
from support.incidents import World, explained, names_of, world
from support.scenes import Held

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

PEOPLE = [(1, "Ada"), (2, "Grace"), (3, "Edsger")]


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as here:
        with here.shop() as connection:
            connection.execute("create table people (id int primary key, name text not null)")
            connection.execute("create table people_backup (id int primary key, name text not null)")
        yield here


@pytest.fixture(autouse=True)
def people(here: World) -> None:
    with here.shop() as connection:
        for table in ("people", "people_backup"):
            connection.execute(f"truncate {table}")
            connection.cursor().executemany(f"insert into {table} values (%s, %s)", PEOPLE)


def refused(work: Any) -> RingfenceError:
    """A call that a rule or the sandbox stops, however it says so."""
    with pytest.raises((Denied, InvalidRequest, CommandFailed, Conflict, SnapshotFailed)) as caught:
        work()
    return caught.value


# -- the freeze that was ignored, and the rows that were invented ---------------------------------------------------------


def test_a_freeze_is_a_rule_and_no_request(here: World) -> None:
    """The agent had been told in capitals to change nothing. It deleted the table and filled it with people it made up."""
    held = here.scene.hold(allow=["sql.*: {database: shop}"])
    held.rf.sql.execute("shop", "update people set name = 'Ada L.' where id = 1")
    here.ceilings("deny: [{sql.write: {database: shop}}]")
    try:
        for statement in (
            "delete from people",
            "truncate people",
            "drop table people",
            "insert into people values (4, 'Nobody'), (5, 'Noone')",
            "update people set name = 'Nobody'",
            "with gone as (delete from people returning 1) select count(*) from gone",
        ):
            refused(lambda statement=statement: held.rf.sql.execute("shop", statement))
            refused(lambda statement=statement: held.rf.sql.query("shop", statement))
        denied = held.refused(Denied, lambda: held.rf.sql.execute("shop", "delete from people"))
        assert "ceiling" in denied.message
        verdict, rules, reason = explained(held)
        assert (verdict, rules) == ("deny", ["sql.write: {database: shop}"]), reason
        # Looking is not frozen.
        assert len(held.rf.sql.query("shop", "select * from people")) == 3
    finally:
        here.ceilings("")
    assert here.rows("people") == [(1, "Ada L."), *PEOPLE[1:]]


def test_rows_that_were_deleted_and_invented_come_back_as_they_were(here: World) -> None:
    """ "Rollback is impossible here", it told its user. It was not."""
    held = here.scene.hold(allow=["sql.*: {database: shop}"])
    held.rf.sql.execute("shop", "delete from people")
    held.rf.sql.execute(
        "shop", "insert into people select n, 'Invented ' || n from generate_series(1, 400) n"
    )
    assert len(here.rows("people")) == 400
    done = held.operator.ask("Rollback", agent=held.id, to="0")
    assert here.rows("people") == PEOPLE, done


# -- the directory that was never made ---------------------------------------------------------------------------------


def test_a_move_into_a_directory_that_was_never_made_loses_no_file(here: World) -> None:
    """The agent thought that `mkdir` had worked. Every file moved there took the place of the one before."""
    files = {"a.txt": "a", "b.txt": "b", "c.txt": "c"}
    held = here.scene.hold(allow=['fs.*: "/workspace/**"'], files=files)
    held.rf.fs.move("a.txt", "archive")
    refused(lambda: held.rf.fs.move("b.txt", "archive"))
    refused(lambda: held.rf.fs.move("c.txt", "archive"))
    assert names_of(held.live) == {"archive": b"a", "b.txt": b"b", "c.txt": b"c"}


MOVE_ALL = ["sh", "-c", "for f in *.txt; do mv $f archive; done"]


def test_the_same_by_a_command_needs_the_right_to_delete(here: World) -> None:
    files = {"a.txt": "a", "b.txt": "b", "c.txt": "c"}
    held = here.scene.hold(
        allow=['exec.run: "*"', 'fs.read: "/workspace/**"', 'fs.write: "/workspace/**"'], files=files
    )
    held.refused(Denied, lambda: held.rf.exec.run(MOVE_ALL))
    assert names_of(held.live) == {name: text.encode() for name, text in files.items()}
    verdict, _, reason = explained(held)
    assert verdict == "deny"
    assert "fs.delete" in reason
    assert "/workspace/a.txt" in reason


def test_and_where_it_has_that_right_the_files_come_back(here: World) -> None:
    files = {"a.txt": "a", "b.txt": "b", "c.txt": "c"}
    held = here.scene.hold(allow=['exec.run: "*"', 'fs.*: "/workspace/**"'], files=files)
    held.rf.exec.run(MOVE_ALL)
    assert names_of(held.live) == {"archive": b"c"}
    held.operator.ask("Rollback", agent=held.id, to="0")
    assert names_of(held.live) == {name: text.encode() for name, text in files.items()}


# -- rm -rf tests/ ~/ --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "argv",
    [
        ["sh", "-c", "rm -rf tests/ patches/ plan/ ~/"],
        ["rm", "-rf", "tests/", "/workspace/"],
        ["sh", "-c", "rm -rf tests/ / --no-preserve-root"],
        ["sh", "-c", "cd tests && rm -rf ../* ../.[a-z]*"],
    ],
    ids=lambda argv: " ".join(argv)[:30],
)
def test_one_call_that_removes_more_than_it_may_removes_nothing(
    here: World, argv: list[str], tmp_path: Path
) -> None:
    """One trailing `~/`, and the home directory of the one who had asked for a clean-up was gone."""
    home = tmp_path / "thesis.tex"
    home.write_text("years of work")
    files = {"tests/a.py": "a", "tests/b.py": "b", "src/main.py": "m", ".profile": "p"}
    held = here.scene.hold(
        allow=[
            'exec.run: "*"',
            'fs.read: "/workspace/**"',
            'fs.delete: "/workspace/tests/**"',
            'fs.delete: "/workspace/tests"',
        ],
        files=files,
    )
    try:
        done = held.rf.exec.run(argv)
    except Denied:
        verdict, _, reason = explained(held)
        assert verdict == "deny"
        assert "fs.delete" in reason
        assert names_of(held.live) == {name: text.encode() for name, text in files.items()}
    else:
        # Nothing but the tests counted: what `~/` and `/` name inside is not the workspace.
        assert all(path.startswith("/workspace/tests") for path in done.changed), done.changed
        assert {"src/main.py", ".profile"} <= set(names_of(held.live))
    assert home.read_text() == "years of work"


# -- the plan whose set held its own backups ---------------------------------------------------------------------------


def test_a_plan_that_takes_its_backups_along_takes_nothing(here: World) -> None:
    """The state file was an old one: `destroy` took the duplicates, the database, and its snapshots with it."""
    files = {"data/db": "rows", "backups/monday": "rows", "backups/tuesday": "rows"}
    held = here.scene.hold(
        allow=['exec.run: "*"', 'fs.*: "/workspace/**"', "sql.*: {database: shop}"],
        deny=[
            'fs.delete: "/workspace/backups/**"',
            'fs.delete: "/workspace/backups"',
            "sql.write: {database: shop, tables: [people_backup]}",
        ],
        files=files,
    )
    held.refused(Denied, lambda: held.rf.exec.run(["rm", "-rf", "data", "backups"]))
    verdict, rules, reason = explained(held)
    assert verdict == "deny"
    assert any("/workspace/backups" in rule for rule in rules), (rules, reason)
    refused(lambda: held.rf.fs.delete("backups", recursive=True))
    for statement in (
        "truncate people, people_backup",
        "drop table people, people_backup",
        "drop schema public cascade",
    ):
        refused(lambda statement=statement: held.rf.sql.execute("shop", statement))
    assert names_of(held.live) == {name: text.encode() for name, text in files.items()}
    assert here.rows("people") == here.rows("people_backup") == PEOPLE


def test_what_brings_things_back_lies_where_no_agent_reaches(here: World) -> None:
    """Rollback points and the journal are the last backup: an agent that may do anything finds neither."""
    held = here.scene.hold(allow=['"*": "**"'], files={"a.txt": "before"})
    held.rf.fs.write_text("a.txt", "after")
    data = here.scene.kernel.data
    _search(held, data)
    points = held.operator.ask("Points", agent=held.id, verify=True)["points"]
    assert points
    assert all(point["verified"] for point in points)
    held.operator.ask("Rollback", agent=held.id, to="0")
    assert (held.live / "a.txt").read_text() == "before"


def _search(held: Held, data: Path) -> None:
    for line in (
        f"rm -rf {data}",
        "rm -rf /workspace/../* /var /tmp/* /root /home 2>/dev/null; true",
        "find / -name '*.snapshot' -delete 2>/dev/null; true",
    ):
        try:
            held.rf.exec.run(["sh", "-c", line])
        except RingfenceError:
            continue
    assert data.is_dir()
