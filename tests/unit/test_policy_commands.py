"""Command rules: words, and the commands that hide inside a command (C01, C02)."""

from __future__ import annotations

import shlex

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ringfence.policy.commands import CommandPattern, CommandSubject
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.matcher import PatternError, compile_pattern, match_command
from ringfence.policy.rules import parse_rule
from ringfence.policy.shell import Reading
from ringfence.policy.types import Request, Verdict

WORDS = [
    ("*", ("anything", "at", "all"), True),
    ("git status", ("git", "status"), True),
    ("git status", ("git", "status", "-s"), False),
    ("git *", ("git",), True),
    ("git *", ("git", "log", "-p"), True),
    ("git *", ("gitk",), False),
    ("git * --stat", ("git", "log", "--stat"), True),
    ("git * --stat", ("git", "a", "b", "--stat"), False),
    ("git * --stat", ("git", "--stat"), False),
    ("python *.py", ("python", "a.py"), True),
    ("python *.py", ("python", "d/a.py"), False),
    ("python src/*.py", ("python", "src/../.py"), False),
    ("python src/**", ("python", "src/a/b.py"), True),
    ("python src/**", ("python", "src/../x.py"), False),
    ("cat out/*", ("cat", "out/.."), False),
    ("echo 'a b'", ("echo", "a b"), True),
    ("echo 'a b'", ("echo", "a", "b"), False),
    ("find . -name '*.py'", ("find", ".", "-name", "*.py"), True),
    ("find . -name '*.py'", ("find", ".", "-name", "a.py"), False),
    (r"echo \*", ("echo", "*"), True),
    (r"echo \*", ("echo", "a"), False),
    ('echo "a\\"b"', ("echo", 'a"b'), True),
    ("echo ''", ("echo", ""), True),
    ("git status", ("/usr/bin/git", "status"), False),
    ("git", ("git ",), False),
]


@pytest.mark.parametrize(("pattern", "argv", "expected"), WORDS)
def test_words(pattern: str, argv: tuple[str, ...], expected: bool) -> None:
    assert match_command(pattern, argv) is expected


@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("a && b", "`&`"),
        ("a; b", "`;`"),
        ("a | b", "`|`"),
        ("echo $HOME", "`$`"),
        ("echo `x`", "` in"),
        ("ls ?", "`?`"),
        ("find . -exec rm {} +", "`{`"),
        ("echo 'a", "open quote"),
        ("echo a\\", "backslash"),
        ("'' a", "program is empty"),
        ("   ", "no word"),
        ("cat a**b", "whole segment"),
    ],
)
def test_command_patterns_that_are_refused_say_why_and_what_to_do(pattern: str, said: str) -> None:
    with pytest.raises(PatternError) as caught:
        compile_pattern("command", pattern)
    assert said in caught.value.message
    assert caught.value.fix


def verdict(*argv: str, allow: str = "*", deny: str = "rm *") -> Verdict:
    policy = AgentPolicy(
        "a",
        [("g1", parse_rule(f"exec.run: {allow}"))],
        [parse_rule(f"exec.run: {deny}", "deny", rule_id="d1")],
    )
    return policy.decide(Request(principal="a", action="exec.run", resource=argv)).verdict


# C02, and more of its kind. No shell is needed for the first ones.
HIDDEN = [
    ("rm", "a"),
    ("/bin/rm", "a"),
    ("./rm", "a"),
    ("X=1", "rm", "a"),
    ("env", "X=1", "rm", "a"),
    ("env", "-u", "X", "rm", "a"),
    ("env", "-S", "rm a"),
    ("env", "-Srm a"),
    ("nice", "-n", "5", "rm", "a"),
    ("timeout", "-s", "KILL", "5", "rm", "a"),
    ("nohup", "setsid", "rm", "a"),
    ("sudo", "-u", "x", "rm", "a"),
    ("flock", "-n", "lock", "rm", "a"),
    ("busybox", "rm", "a"),
    ("prlimit", "--nproc=1", "rm", "a"),
    ("prlimit", "--nproc", "1", "rm", "a"),
    ("start-stop-daemon", "-S", "-x", "/bin/rm", "--", "a"),
    ("gdb", "--args", "rm", "a"),
    ("fakeroot", "rm", "a"),
    ("setarch", "-R", "rm", "a"),
    ("systemd-run", "--wait", "rm", "a"),
    ("/lib64/ld-linux-x86-64.so.2", "/bin/rm", "a"),
    ("xargs", "rm"),
    ("xargs", "-0", "-n", "1", "rm"),
    ("find", ".", "-exec", "rm", "{}", "+"),
    ("find", ".", "-name", "x", "-execdir", "/bin/rm", "-f", "{}", ";"),
    ("su", "-c", "rm a"),
    ("watch", "rm", "a"),
    ("bash", "-euo", "pipefail", "-c", "rm a"),
    ("bash", "-c", "--", "rm a"),
    ("bash", "--norc", "-lc", "rm a"),
    *(
        ("sh", "-c", script)
        for script in (
            "rm a",
            "cd /w && rm a",
            "true || rm a",
            "true; rm a",
            "true & rm a",
            "echo a | xargs rm",
            "find . -exec rm {} +",
            "sh -c 'rm a'",
            "X=1 rm a",
            "X=$(date) rm a",
            "(rm a)",
            "{ rm a; }",
            "! rm a",
            "rm\ta",
            "true\nrm a",
            "true #\nrm a",
            "true \\\n&& rm a",
            "r\\m a",
            "'rm' a",
            'r"m" a',
            "echo $(rm a)",
            "echo `rm a`",
            'echo "$(rm a)"',
            "cat <(rm a)",
            "echo > $(rm a)",
            "if true; then rm a; fi",
            "while rm a; do true; done",
            "for f in *; do rm $f; done",
            "for f in $(rm a); do true; done",
            "[[ -n $(rm a) ]] && true",
            "eval rm a",
            "eval 'rm a'",
            "trap 'rm a' EXIT",
            "exec rm a",
            "command rm a",
            "2>/dev/null rm a",
            "rm a >log 2>&1",
            "case x in x) rm a;; esac",
            "cat <<EOF\nx\nEOF\nrm a",
            "cat <<EOF\n$(rm a)\nEOF",
            "cat <<-EOF\n\tit's\n\tEOF\nrm a # '",
            "cat <<'A' <<B\nit's\nA\n`rm a`\nB",
            "cat <<'EOF'\n$x `\nEOF\nrm a",
            "f() { rm a; }; f",
            "function f { rm a; }; f",
            "case x in (a|b) ls;; *) true; rm a;& esac",
            "case x in a) ls;; esac; rm a",
            """echo "$'"; rm a; echo "'" """,
            """echo $"x" && rm a""",
            "echo $((1 + 2)); rm a",
            "echo $((rm a))",
        )
    ),
]


@pytest.mark.parametrize("argv", HIDDEN, ids=shlex.join)
def test_a_denied_program_is_found_wherever_it_hides(argv: tuple[str, ...]) -> None:
    assert verdict(*argv) is Verdict.DENY


OPAQUE = [
    ("rm\ta",),
    ("rm\na",),
    ("sh",),
    ("sh", "-s"),
    ("xargs", "-I", "X", "X", "a"),
    *(
        ("sh", "-c", script)
        for script in (
            "$(echo rm) a",
            "`echo rm` a",
            "$R a",
            "${R} a",
            "$'rm' a",
            "/bin/r? a",
            "{rm,a}",
            "eval $x",
            "echo rm a | sh",
            "fish -c 'rm a'",
            "mapfile -C 'rm a' x < y",
            "bash <<< 'rm a'",
            'f() { "$@"; }; f rm a',
            "cat <(ls)",
            "ls > >(cat)",
            "cat <<$X\nrm a\n",
            "cat <<EOF\na\\\nEOF\nit's\nEOF\nrm a # '",
            "echo $(cat <<E\n)\nE\n)",
            """echo "${x:-'}"; rm a; "'}" """,
            """echo $'a\\'; rm a; echo '""",
            "sh /dev/stdin <<E\nrm a\nE",
            ". /dev/stdin <<E\nrm a\nE",
            "sh <<E\nrm a\nE",
            "alias q=true; q a",
            "echo ${y:-$(rm a)}",
            "echo 'open",
            "echo $(open",
            'sh -c "$x"',
            "find . $x",
        )
    ),
]


@pytest.mark.parametrize("argv", OPAQUE, ids=shlex.join)
def test_what_can_not_be_followed_is_asked_and_never_allowed(argv: tuple[str, ...]) -> None:
    assert verdict(*argv) is Verdict.ASK


HARMLESS = [
    ("ls", "-l"),
    ("echo", "rm", "a"),
    ("grep", "rm", "file"),
    ("python", "rm.py"),
    ("sh", "build.sh"),
    ("command", "-v", "rm"),
    ("cat", "a;rm", "b"),
    *(
        ("sh", "-c", script)
        for script in (
            "echo 'rm a'",
            'echo "rm a" # rm a',
            "git log 2>&1 | head -n 3",
            "for f in *; do echo $f; done",
            "find . -name '*.py' -print",
            "test -f a && cat a",
            "[ -f a ] && cat a",
            "x=1; echo $x",
            "cat <<EOF\nrm a\nEOF",
            "cat <<'EOF'\n$(rm a)\nEOF",
            "f() { true; }; f",
            "case $1 in rm) echo rm a;; (x|y) true;; esac",
            "echo $(( $x + 1 ))",
            "echo a 2>/dev/null >&2 3>&-",
        )
    ),
]


@pytest.mark.parametrize("argv", HARMLESS, ids=shlex.join)
def test_what_only_mentions_a_denied_program_is_not_refused(argv: tuple[str, ...]) -> None:
    assert verdict(*argv) is Verdict.ALLOW


def test_a_rule_for_one_command_does_not_let_another_ride_on_it() -> None:
    # C01
    assert verdict("sh", "-c", "cd /w && touch /w/marker", allow="cd *") is Verdict.DENY
    assert verdict("cd", "/w", allow="cd *") is Verdict.ALLOW
    assert verdict("cd /w && touch /w/marker", allow="cd *") is Verdict.DENY


def test_unknown_words_are_asked_where_a_rule_may_mean_them() -> None:
    deny = "rm -rf *"
    assert verdict("rm", "-rf", "a", deny=deny) is Verdict.DENY
    assert verdict("rm", "a", deny=deny) is Verdict.ALLOW
    assert verdict("xargs", "rm", deny=deny) is Verdict.ASK
    assert verdict("sh", "-c", "rm $x", deny=deny) is Verdict.ASK
    assert verdict("sh", "-c", "rm -i $x", deny=deny) is Verdict.ALLOW
    assert verdict("sh", "-c", "rm -rf $x", deny=deny) is Verdict.DENY
    assert verdict("sh", "-c", "cat ./a//.env", deny="cat a/.env") is Verdict.DENY


def alone(allow: str, argv: tuple[str, ...]) -> Verdict:
    policy = AgentPolicy("a", [("g1", parse_rule(f"exec.run: {allow}"))])
    return policy.decide(Request(principal="a", action="exec.run", resource=argv)).verdict


@pytest.mark.parametrize("argv", OPAQUE, ids=shlex.join)
def test_what_can_not_be_followed_is_asked_where_nothing_is_denied_too(argv: tuple[str, ...]) -> None:
    assert alone("*", argv) is Verdict.ASK
    if not any(char in "".join(argv) for char in "\n\t"):
        assert alone(shlex.quote(argv[0]) + " *", argv) is Verdict.ASK
        # Who has written it out has seen it.
        assert alone(CommandPattern.of(argv).text, argv) is Verdict.ALLOW


def test_without_a_deny_or_ask_for_commands_what_can_be_followed_is_allowed() -> None:
    for argv in (*HIDDEN, *HARMLESS):
        reading = Reading(argv)
        expected = Verdict.ASK if reading.opaque or reading.anywhere else Verdict.ALLOW
        assert alone("*", argv) is expected


def test_reading_ends_for_hostile_input() -> None:
    nested = "rm a"
    for _ in range(40):
        nested = f"sh -c {shlex.quote(nested)}"
        if len(nested) > 60_000:
            break
    # Only brackets: the shell refuses it, so nothing hides there.
    assert verdict("sh", "-c", "(" * 60_000) is Verdict.ALLOW
    for argv in (
        ("sh", "-c", nested),
        ("sh", "-c", "$(" * 30_000),
        ("sh", "-c", "`" * 60_001),
        ("sh", "-c", "a;" * 30_000),
        ("env", "-a") * 2000,
        ("xargs",) * 4000,
        ("find", "-exec") * 2000,
    ):
        assert verdict(*argv) in {Verdict.ASK, Verdict.DENY}


@given(st.lists(st.text(alphabet="ab */'\"\\-=$;é", max_size=6), min_size=1, max_size=5))
@settings(max_examples=300)
def test_the_literal_pattern_of_a_command_matches_exactly_it(argv: list[str]) -> None:
    if not argv[0]:
        return
    pattern = compile_pattern("command", CommandPattern.of(argv).text)
    assert pattern.permits(CommandSubject(tuple(argv)))
    assert not pattern.permits(CommandSubject((*argv, "")))
    assert not pattern.permits(CommandSubject((argv[0] + "x", *argv[1:])))


@given(st.text(alphabet="rm a;|&$(){}'\"`\\\n<>#*=[]!x-c", max_size=60))
@settings(max_examples=1000)
def test_any_script_is_read_to_an_end(script: str) -> None:
    reading = Reading(("sh", "-c", script))
    assert reading.parts[0] == ("sh", "-c", script)


@pytest.mark.parametrize("words", ["watch -n", "xargs -I", "env -i", "timeout -k"])
def test_a_command_that_wraps_itself_again_and_again_is_not_read_without_end(words: str) -> None:
    """It was read for half a minute, in which the kernel did nothing else."""
    script = f"{words} " * (60_000 // len(words))
    for argv in (("sh", "-c", script), tuple(script.split())):
        reading = Reading(argv)
        # Each command is noted in three spellings.
        assert sum(map(len, reading.parts)) < 3 * (len(argv) + (1 << 17))
        assert reading.opaque
