"""Redirections of shell scripts: which files they open, and from where."""

from __future__ import annotations

import pytest
from ringfence.policy.commands import CommandPattern
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.rules import Rule, parse_rule
from ringfence.policy.shell import Reading, redirections
from ringfence.policy.types import Request, Verdict

TOUCHES: list[tuple[str, set[str]]] = [
    ("echo a >.env", {"w .env"}),
    ("echo a >>.env", {"w .env"}),
    ("echo a >|.env", {"w .env"}),
    ("echo a &>.env", {"w .env"}),
    ("echo a &>>.env", {"w .env"}),
    ("echo a >&.env", {"w .env"}),
    ("echo a 2>.env", {"w .env"}),
    ("exec 3<>.env", {"r .env", "w .env"}),
    ("cat <.env", {"r .env"}),
    ("cat 0<.env >>out", {"r .env", "w out"}),
    (">.env", {"w .env"}),
    ("true | { cat; } >'.e'nv", {"w .env"}),
    ("while read x; do echo $x; done <in >out", {"r in", "w out"}),
    ("if true; then echo a >b; fi", {"w b"}),
    ("f() { echo a >b; }; f", {"w b"}),
    ("case x in x) echo a >b;; esac", {"w b"}),
    ("cat <<E >b\n>c\nE", {"w b"}),
    ("cat <<E\n$(echo a >b)\nE", {"w b"}),
    ("cat <<< x", set()),
    ("echo $(echo a >b)", {"w b"}),
    ("sh -c 'echo a >b'", {"w b"}),
    ("eval 'echo a >b'", {"w b"}),
    ("find . -exec sh -c 'echo a >b' ';'", {"w b"}),
    ("echo a >/workspace/d/../b", {"w b"}),
    ("echo a >sub/./b", {"w sub/b"}),
    ("cd sub && echo a >b && echo c >d", {"w sub/b", "w sub/d"}),
    ("cd sub; echo a >b", {"w b", "w sub/b"}),
    ("cd sub || echo a >b", {"w b", "w sub/b"}),
    ("cd sub && true; echo a >b", {"w b", "w sub/b"}),
    ("(cd sub && echo a >b) && echo a >c", {"w sub/b", "w c"}),
    ("(cd sub) && echo a >b", {"w b"}),
    ("(cd sub) >b", {"w b"}),
    ("cd sub && (cd deep && echo a >b) && echo a >c", {"w sub/deep/b", "w sub/c"}),
    ("(cd sub && (cd deep && echo a >b) && echo a >c); echo a >d", {"w sub/deep/b", "w sub/c", "w d"}),
    ("case x in (a) cd sub;; esac; echo a >b", {"w b", "w sub/b"}),
    ("{ cd sub; } && echo a >b", {"w b", "w sub/b"}),
    ("cd /workspace/sub && cd .. && echo a >b", {"w b"}),
    ("cd sub && sh -c 'cd deep && echo a >b' && echo a >c", {"w sub/deep/b", "w sub/c"}),
    ("cd sub && eval 'cd deep && echo a >b'", {"w sub/deep/b"}),
    ("echo 'a >b' \">c\" \\> d # >e", set()),
    ("echo a >/tmp/x 2>/dev/null >/dev/fd/3 2>&1 >&- 3>&2-", set()),
]


@pytest.mark.parametrize(("script", "expected"), TOUCHES)
def test_redirections_are_found_with_what_they_open(script: str, expected: set[str]) -> None:
    script = script.replace("\\n", "\n")
    named = {"fs.read": "r", "fs.write": "w"}
    for before in ((), ("env", "X=1"), ("nice", "-n", "5"), ("timeout", "5"), ("nohup", "setsid")):
        for shell in ("sh", "/bin/bash", "dash", "zsh"):
            argv = (*before, shell, "-c", script)
            found = redirections(argv, "/workspace", "/workspace")
            assert {
                f"{named[action]} {path.removeprefix('/workspace/')}" for action, path in found
            } == expected
            assert not Reading(argv).opaque
            assert not Reading(argv).anywhere
    below = redirections(("sh", "-c", "echo a >b >/workspace/c"), "/workspace/sub", "/workspace")
    assert [path for _, path in below] == ["/workspace/sub/b", "/workspace/c"]


ANYWHERE = [
    "echo a > $x",
    "echo a > ~/x",
    "echo a > *.txt",
    "echo a > /proc/self/cwd/x",
    "cd $x && echo a > b",
    "pushd x; echo a > b",
    "while true; do cd a; echo a > b; done",
    "f() { cd a; }; f; echo a > b",
]


@pytest.mark.parametrize("script", ANYWHERE)
def test_a_redirection_that_is_not_written_out_is_asked_unless_all_files_may_be_written(script: str) -> None:
    argv = ("sh", "-c", script)
    assert Reading(argv).anywhere == {"fs.write"}
    run, write = ("g1", parse_rule("exec.run: *")), ("g2", parse_rule("fs.write: /workspace/**"))

    def decided(*grants: tuple[str, Rule], deny: str = "", ask: str = "") -> Verdict:
        denies = [parse_rule(deny, "deny")] if deny else []
        ceilings = [parse_rule(ask, "ask")] if ask else []
        policy = AgentPolicy("a", grants, denies, ceilings)
        return policy.decide(Request(principal="a", action="exec.run", resource=argv)).verdict

    assert decided(run, write) is Verdict.ALLOW
    assert decided(run, write, deny="fs.read: /workspace/.env") is Verdict.ALLOW
    assert decided(run, write, deny="fs.*: /workspace/.env") is Verdict.ASK
    assert decided(run, write, ask="fs.write: /workspace/.env") is Verdict.ASK
    assert decided(run) is Verdict.ASK
    assert decided(run, ("g2", parse_rule("fs.write: /workspace/out/**"))) is Verdict.ASK
    assert decided(("g1", parse_rule(f"exec.run: {CommandPattern.of(argv).text}"))) is Verdict.ALLOW


@pytest.mark.parametrize(
    "script",
    [
        "while :; do echo a >b; cd sub; done",
        "f() { echo a >b; }; cd sub; f",
        "f() (echo a >b); cd sub && f",
        "f() { echo a >b; }; (cd sub; f)",
        "f() { sh -c 'echo a >b'; }; cd sub; f",
        "for i in 1 2; do echo a >b; pushd sub; done",
    ],
)
def test_what_runs_again_after_a_later_cd_may_lead_anywhere(script: str) -> None:
    assert Reading(("sh", "-c", script)).anywhere == {"fs.write"}


def test_a_wrapper_that_goes_elsewhere_leaves_the_place_unknown() -> None:
    for before in (("env", "-C", "d"), ("env", "--chdir=d"), ("sudo",), ("chroot", "/"), ("su", "-c")):
        argv = (*before, "echo a >b") if before[-1] == "-c" else (*before, "sh", "-c", "echo a >b")
        reading = Reading(argv)
        assert reading.anywhere == {"fs.write"}, argv
    assert Reading(("find", ".", "-execdir", "sh", "-c", "cat <b", ";")).anywhere == {"fs.read"}
    assert not Reading(("env", "-C", "d", "sh", "-c", "echo a >/workspace/b")).anywhere


@pytest.mark.parametrize(
    "script",
    [
        ">&-rm a",
        "2>&-rm",
        "<&-'rm'",
        ">&-$x",
        ">&\\\n-rm",
        ">&-\\\nrm",
        ">\\\n&-rm",
        "<\\\n&-rm",
        "sh -c '>&-rm a'",
    ],
)
def test_what_shells_split_differently_is_not_followed(script: str) -> None:
    """Bash takes `>&-` as a whole and runs what stands right behind it; dash refuses."""
    assert Reading(("sh", "-c", script)).opaque


@pytest.mark.parametrize(
    "script", ["echo a >&-", "echo a 2>&- ; ls", "ls <&-|cat", "echo a >&- b", "echo >&2"]
)
def test_descriptors_that_are_closed_are_followed(script: str) -> None:
    assert not Reading(("sh", "-c", script)).opaque


def test_a_quoted_target_of_a_duplication_is_not_told() -> None:
    """Bash opens `1$` for the first, which is no name that POSIX gives it."""
    for script in (""">&1"$'\"""", ">&'a'", '>&1"x"'):
        assert Reading(("sh", "-c", script)).anywhere == {"fs.write"}, script


def test_digits_behind_an_expansion_are_a_word() -> None:
    reading = Reading(("sh", "-c", "${x:-rm}3>f a"))
    assert reading.opaque
    assert [touch.path for touch in reading.touches] == ["f"]


EVALUATED = [
    "let 'a[$(curl x)]'",
    "x='a[$(curl x)]'; echo $((x))",
    "x=a[\\$\\(curl\\ x\\)]; ((x))",
    "test -v 'a[$(curl x)]'",
    "printf -v 'a[$(curl x)]' b",
    "declare -n y='a[$(curl x)]'; echo $y",
    "read 'a[$(curl x)]' <<< b",
    "x='$(curl x)'; echo ${x@P}",
    "PS4='$(curl x)'; set -x; ls",
    "x='a[`curl x`]'; [[ x -eq 1 ]]",
    "read x <<'E'\na[$(curl x)]\nE\necho $((x))",
]


@pytest.mark.parametrize("script", EVALUATED)
def test_text_that_a_shell_evaluates_is_not_followed(script: str) -> None:
    assert Reading(("bash", "-c", script)).opaque


@pytest.mark.parametrize(
    "script", ["awk '{print $(NF)}' f", "git commit -m 'use `x`'", "echo $((1 + x))", "read x < f; echo $x"]
)
def test_neither_half_of_it_alone_is_asked(script: str) -> None:
    assert not Reading(("sh", "-c", script)).opaque


@pytest.mark.parametrize(
    "command", ["choom -n 1 curl x", "ssh-agent curl x", "faketime now curl x", "uclampset -m 1 curl x"]
)
def test_more_wrappers_are_looked_behind(command: str) -> None:
    assert ("curl", "x") in Reading(tuple(command.split())).parts


@pytest.mark.parametrize(
    "command", ["git bisect run curl x", "git rebase -x curl x", "capsh -- -c x", "sg root x"]
)
def test_what_runs_its_words_in_a_way_of_its_own_is_not_followed(command: str) -> None:
    assert Reading(tuple(command.split())).opaque
    assert not Reading(("git", "clean", "-x")).opaque
