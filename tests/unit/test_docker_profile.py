"""The profile for engines lets through what the native filter lets through, and nothing else."""

from __future__ import annotations

import errno
import json
import resource
from itertools import product
from typing import Any

import pytest
from ringfence.sandbox.docker.profile import all_but, profile
from ringfence.sandbox.native import calls, seccomp
from unit.test_seccomp_filter import ARCH, judge

TABLES = {"x86_64": calls.X86_64, "aarch64": calls.AARCH64}
ALLOW, ERROR = 0x7FFF0000, 0x00050000
HIGH = 1 << 32
ARGUMENTS = {
    "clone": [(flag | 17,) for flag in (0, *(1 << bit for bit in range(33)))],
    "clone3": [(0, 0)],
    "socket": [(family | high,) for family, high in product(range(64), (0, HIGH))],
    "socketpair": [(family | high,) for family, high in product(range(64), (0, HIGH))],
    "ioctl": [(0, request) for request in (*range(0x5400, 0x5480), HIGH | 0x5412, HIGH | 0x541C, 0xFFFFFFFF)],
    "mknod": [(0, kind << 12 | 0o644) for kind in range(16)],
    "mknodat": [(0, 0, kind << 12 | 0o644) for kind in range(16)],
    "setrlimit": [(which | high,) for which, high in product(range(18), (0, HIGH))],
    "prlimit64": [(0, which | high, new) for which, high, new in product(range(18), (0, HIGH), (0, 1, HIGH))],
    "memfd_create": [(0, 0)],
}


def _meets(argument: dict[str, Any], values: tuple[int, ...]) -> bool:
    value = [*values, 0, 0, 0, 0, 0, 0][argument["index"]]
    wanted = argument["value"]
    if argument["op"] == "SCMP_CMP_MASKED_EQ":
        return value & wanted == argument["valueTwo"]
    return (value == wanted) is {"SCMP_CMP_EQ": True, "SCMP_CMP_NE": False}[argument["op"]]


def _verdicts(document: dict[str, Any], name: str, values: tuple[int, ...]) -> set[int]:
    """What the rules say that fit; an engine may take any of them, so they have to agree."""
    found = {
        ALLOW if rule["action"] == "SCMP_ACT_ALLOW" else ERROR | rule["errnoRet"]
        for rule in document["syscalls"]
        if name in rule["names"] and all(_meets(one, values) for one in rule["args"])
    }
    return found or {ERROR | document["defaultErrnoRet"]}


@pytest.mark.parametrize("machine", sorted(TABLES))
def test_both_filters_say_the_same_of_every_call(machine: str) -> None:
    document = json.loads(profile())
    program = seccomp.program(machine=machine)
    compared = 0
    for name, number in calls.numbers(TABLES[machine]).items():
        for values in ARGUMENTS.get(name, [()]):
            native = judge(program, ARCH[machine], number, *values)
            assert _verdicts(document, name, values) == {native}, (name, values)
            compared += 1
    assert compared > 800


@pytest.mark.parametrize("machine", sorted(TABLES))
def test_both_say_the_same_where_there_are_doors(machine: str) -> None:
    document = json.loads(profile(tcp=True))
    program = seccomp.program(tcp=True, machine=machine)
    number = calls.numbers(TABLES[machine])["socket"]
    for family in (0, 1, 2, 10, 16, 17, 1 << 32 | 2):
        for kind in (0, 1, 2, 3, 5, 1 | 0o2004000, 2 | 0o2000000, 1 << 32 | 1):
            for protocol in (0, 1, 6, 17, 132, 262, 1 << 32 | 6):
                values = (family, kind, protocol)
                native = judge(program, ARCH[machine], number, *values)
                assert _verdicts(document, "socket", values) == {native}, values


def test_what_is_in_no_list_is_refused() -> None:
    document = json.loads(profile())
    assert document["defaultAction"] == "SCMP_ACT_ERRNO"
    assert _verdicts(document, "a_call_of_tomorrow", ()) == {ERROR | errno.ENOSYS}
    named = {name for rule in document["syscalls"] for name in rule["names"]}
    assert named == calls.ALLOWED | calls.RULED | calls.REFUSED | calls.ABSENT
    # Foreign architectures are killed as long as none is listed that the table does not know.
    assert document["architectures"] == ["SCMP_ARCH_X86_64", "SCMP_ARCH_AARCH64"]


def test_all_but_leaves_out_exactly_what_it_says() -> None:
    for values in ((resource.RLIMIT_CORE,), (0x5412, 0x541C), (0, 0xFFFFFFFF)):
        cubes = all_but(*values)
        near = {value ^ 1 << bit for value in values for bit in range(32)} | set(range(100))
        for number in near | set(values):
            assert any(number & mask == wanted for mask, wanted in cubes) is (number not in values)
            assert sum(number & mask == wanted for mask, wanted in cubes) <= 1
