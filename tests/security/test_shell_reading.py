"""What is read of a shell script, held against what real shells do with it: no file and no program of theirs is missed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from ringfence.policy.shell import Reading, redirections

SHELLS = [found for name in ("dash", "bash") if (found := shutil.which(name))]
PIECES = [
    *("mark", "mark", "mark ", " mark ", "m", "ark", "echo a", ":", "true", "b", "c", "d/e", "cd d", "cd d && ", "cd ..", "x=", "1", "-"),
    *(">", ">>", ">|", "&>", ">&", "2>", "<>", "<", "3>&1", ">&-", "<<<", "<<E\n", "<<'E'\n", "<<-E\n", "E\n", "\nE\n"),
    *(" ", " ", " ", "\t", "\n", ";", "&&", "||", "|", "(", ")", "{ ", "; }", "#", " #", "! ", "\\", "\\\n"),
    *("'", '"', "$x", "${x:-b}", "${x}", "{x}", "${x:-", "}", "$(", "`", "$'", '$"', "\"$'\"", "$((1+1))", "$((", "))", "~", "*"),
    *("if true; then ", "; fi", "case x in ", "x) ", ";; esac", "eval ", "exec ", "command ", "f() { ", "; f", "[[ ", " ]]"),
]  # fmt: skip
scripts = st.lists(st.sampled_from(PIECES), min_size=2, max_size=14).map("".join)


def done_by(shell: str, script: str, place: Path) -> tuple[set[str], bool]:
    """Files that a shell opened for writing, as paths of a workspace, and whether it ran the program `mark`."""
    work = place / "w"
    (work / "d").mkdir(parents=True)
    try:
        subprocess.run(
            [shell, "-c", script],
            cwd=work,
            env={"PATH": str(place.parent / "bin"), "HOME": str(work), "MARKED": str(place / "marked")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=20,
            check=False,
        )
        marked = (place / "marked").exists()
        made = {str(path.relative_to(work)) for path in work.rglob("*") if path.is_file()}
        made |= {f"../{path.name}" for path in place.iterdir() if path.name not in {"w", "marked"}}
    finally:
        shutil.rmtree(place)
    return made, marked


@pytest.mark.parametrize("shell", SHELLS)
def test_no_file_and_no_program_of_a_script_is_missed(shell: str, tmp_path: Path) -> None:
    program = tmp_path / "bin" / "mark"
    program.parent.mkdir()
    program.write_text('#!/bin/sh\n: > "$MARKED"\n')
    program.chmod(0o755)
    told = {"files": 0, "programs": 0}

    @settings(
        max_examples=400, deadline=None, database=None, suppress_health_check=[HealthCheck.filter_too_much]
    )
    @given(scripts)
    def held(script: str) -> None:
        argv = ("sh", "-c", script)
        reading = Reading(argv)
        if reading.opaque:
            return
        made, marked = done_by(shell, script, tmp_path / "place")
        found = {path for action, path in redirections(argv, "/s/w", "/s") if action == "fs.write"}
        if "fs.write" not in reading.anywhere:
            opened = {str(Path("/s/w", path).resolve()) for path in made}
            assert opened <= found, script
            told["files"] += bool(made)
        if marked:
            assert any(part[0] == "mark" for part in reading.parts), script
            told["programs"] += 1

    held()
    assert min(told.values()) > 0, told
