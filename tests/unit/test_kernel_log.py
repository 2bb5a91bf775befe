"""The kernel's own log: bounded, private, and calm under a flood."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from ringfence.kernel import kernel_log
from ringfence.kernel.kernel_log import RECORD_CHARS_MAX, SAME_PLACE_MAX, Calm
from ringfence.kernel.logs import LOG_BYTES_MAX
from ringfence.kernel.server.operator_door import to_problem

FLOOD = """
import logging, os, sys
from pathlib import Path
from ringfence.kernel.kernel_log import place, set_up
set_up(Path(sys.argv[1]))
log = logging.getLogger("ringfence.test")
for number in range(2000):
    # Each from a place of its own, so that only the file's size bounds them.
    fields = {"name": log.name, "levelno": 40, "levelname": "ERROR", "pathname": "x", "lineno": number}
    log.handle(logging.makeLogRecord({**fields, "msg": f"{number} " + "y" * 100_000}))
print("printed at the end", place(), flush=True)
os.write(2, b"written at the end\\n")
"""


def flood(data: Path, stderr: Path) -> None:
    with stderr.open("ab") as log:
        subprocess.run([sys.executable, "-c", FLOOD, str(data)], stdout=log, stderr=log, check=True)


def test_the_log_of_a_kernel_in_the_background_turns_over(tmp_path: Path) -> None:
    flood(tmp_path, tmp_path / "kernel.log")
    files = {path.name: path.stat() for path in tmp_path.iterdir()}
    assert set(files) == {"kernel.log", "kernel.log.1"}
    assert all(stat.st_size <= LOG_BYTES_MAX + RECORD_CHARS_MAX for stat in files.values())
    assert files["kernel.log"].st_mode & 0o077 == 0
    text = (tmp_path / "kernel.log").read_text()
    # What is no record is in the newest file too.
    assert text.endswith(f"printed at the end `{tmp_path / 'kernel.log'}`\nwritten at the end\n")
    assert "characters left out" in text
    assert " 1999 y" in text


def test_a_kernel_in_the_foreground_writes_no_file(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    data = tmp_path / "data"
    data.mkdir()
    flood(data, elsewhere)
    assert list(data.iterdir()) == []
    assert elsewhere.read_text().endswith(
        "printed at the end the output of `ringfence up`\nwritten at the end\n"
    )


def record(line: int, message: str) -> logging.LogRecord:
    return logging.LogRecord("ringfence.test", logging.WARNING, "x.py", line, message, None, None)


def test_a_flood_from_one_place_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(kernel_log.time, "monotonic", lambda: now[0])
    calm = Calm()
    assert sum(calm.filter(record(1, "flood")) for _ in range(500)) == SAME_PLACE_MAX
    assert calm.filter(record(2, "other"))
    now[0] += 61
    first = record(1, "flood")
    assert calm.filter(first)
    assert first.getMessage() == f"flood ({500 - SAME_PLACE_MAX} more like this were left out)"
    second = record(1, "flood")
    assert calm.filter(second)
    assert second.getMessage() == "flood"


def test_a_bug_says_where_its_details_are(caplog: pytest.LogCaptureFixture) -> None:
    problem = to_problem(ZeroDivisionError("x"))
    assert problem.reason == "Internal"
    assert str(problem).endswith("report it with what the output of `ringfence up` says of it")
    assert "ZeroDivisionError" in caplog.text
