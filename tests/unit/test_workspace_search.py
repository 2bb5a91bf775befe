"""Searching by name and content."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ringfence.sandbox import search
from ringfence.sandbox.workspace import Workspace, WorkspaceError


@pytest.fixture
def live(tmp_path):
    root = tmp_path / "live"
    (root / "src/deep").mkdir(parents=True)
    (root / "a.py").write_text("import os\n")
    (root / "src/b.py").write_text("one\nimport os\nimport os.path\n")
    (root / "src/deep/c.py").write_text("nothing")
    (root / "src/deep/.env").write_text("import SECRET\n")
    (root / "src/link.py").symlink_to("b.py")
    return root


@pytest.fixture
def workspace(live):
    with Workspace(live) as opened:
        yield opened


def everything(_):
    return True


def paths(found):
    return [match.path for match in found[0]]


def test_names(workspace):
    assert paths(workspace.search("/workspace", "*.py", "", 0, everything)) == ["/workspace/a.py"]
    assert paths(workspace.search("/workspace", "**/*.py", "", 0, everything)) == [
        "/workspace/a.py",
        "/workspace/src/b.py",
        "/workspace/src/deep/c.py",
        "/workspace/src/link.py",
    ]
    assert paths(workspace.search("/workspace/src", "deep/**", "", 0, everything)) == [
        "/workspace/src/deep/.env",
        "/workspace/src/deep/c.py",
    ]
    assert workspace.search("/workspace", "none/*", "", 0, everything) == ([], 0, False)


def test_content_with_lines_and_links_not_followed(workspace):
    found, withheld, truncated = workspace.search("/workspace", "", "import os", 0, everything)
    assert [(match.path, match.line, match.text) for match in found] == [
        ("/workspace/a.py", 1, "import os"),
        ("/workspace/src/b.py", 2, "import os"),
        ("/workspace/src/b.py", 3, "import os.path"),
    ]
    assert (withheld, truncated) == (0, False)


def test_what_may_not_be_seen_is_counted_and_never_opened(workspace):
    found, withheld, _ = workspace.search(
        "/workspace", "", "import", 0, lambda path: not path.endswith(".env")
    )
    assert withheld == 1
    assert all("SECRET" not in match.text for match in found)


def test_the_limit_says_that_it_cut(workspace):
    assert workspace.search("/workspace", "", "import os", 2, everything)[2] is True
    assert workspace.search("/workspace", "", "import os", 3, everything)[2] is False
    assert workspace.search("/workspace", "**", "", 5, everything)[2] is False
    assert workspace.search("/workspace", "**", "", 4, everything)[2] is True


def test_stop_ends_it(workspace):
    assert workspace.search("/workspace", "", "import", 0, everything, stop=lambda: True) == ([], 0, True)


def test_long_lines_are_cut_around_the_hit_and_binary_is_harmless(workspace, live):
    (live / "src/big").write_bytes(
        b"x" * 3_000_000 + b"needle" + b"y" * 3_000_000 + b"\nneedle\x1b[31m\xff\n"
    )
    found, _, _ = workspace.search("/workspace", "src/big", "needle", 0, everything)
    assert [match.line for match in found] == [1, 2]
    assert all("needle" in match.text and len(match.text) <= 400 for match in found)
    assert "\x1b" not in found[1].text


@pytest.mark.parametrize("size", [(1 << 20) - 3, (1 << 20) - 1, 1 << 20])
def test_a_hit_across_chunks_is_one_hit(workspace, live, size):
    (live / "src/big").write_bytes(b"a\n" + b"x" * size + b"needle" + b"z" * 10 + b"\nneedle")
    found, _, _ = workspace.search("/workspace", "src/big", "needle", 0, everything)
    assert [match.line for match in found] == [2, 3]


@pytest.mark.parametrize(
    ("glob", "text", "limit"),
    [("/abs", "", 0), ("../x", "", 0), ("a//b", "", 0), ("", "a\nb", 0), ("", "x", -1)],
)
def test_what_can_not_match_is_refused(workspace, glob, text, limit):
    with pytest.raises(WorkspaceError) as caught:
        workspace.search("/workspace", glob, text, limit, everything)
    assert caught.value.reason == "InvalidRequest"


def reference(glob: str) -> re.Pattern[str]:
    """The same globs as regular expressions: right, but exponential on bad ones."""
    parts = []
    for number, part in enumerate(glob.split("/")):
        last = number == glob.count("/")
        if part == "**":
            parts.append(
                "(?:[^/]+(?:/[^/]+)*)?" if last and number == 0 else "(?:/[^/]+)*" if last else "(?:[^/]+/)*"
            )
            continue
        body = "".join("[^/]*" if char == "*" else re.escape(char) for char in part)
        parts.append(body + ("" if last or glob.split("/")[number + 1 :] == ["**"] else "/"))
    return re.compile("".join(parts))


globs = st.lists(
    st.sampled_from(["a", "b", "*", "**", "a*", "*b", "a*b", "*a*"]), min_size=1, max_size=4
).map("/".join)
names = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=5).map("/".join)


@given(glob=globs.filter(lambda glob: "**/**" not in glob), name=names)
def test_globs_mean_what_they_say(glob, name):
    said = search.matches(tuple(glob.split("/")), tuple(name.split("/")))
    assert said == (reference(glob).fullmatch(name) is not None)


def test_no_glob_takes_long():
    # A backtracking matcher needs more steps here than there are atoms; the suite's own timeout would end it.
    assert search.matches(("*a" * 400 + "b",), ("a" * 255,)) is False
    assert search.matches(("**", "x") * 300, ("a",) * 500) is False
