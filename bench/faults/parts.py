"""The parts of the fault proof."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from support import cuts, cutter
from support.clocks import JUMPS, clock_storm
from support.instants import STRIKES, Storm
from support.isolation import lists
from support.jobs import POINTS
from support.matrix import MODES, VICTIMS, Column, Ground, Result, ground
from support.recoveries import recover
from support.scenes import scene_on

if TYPE_CHECKING:
    from bench.report import Section

FEW_POINTS = ("before_intent", "before_effect", "before_outcome")
"""Without `--full`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One run.

    Attributes:
        full: everything.
        seed: of what is random.
        strikes: random instants.
        say: gets a line for a person who waits.
    """

    full: bool
    seed: int
    strikes: int
    say: Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part.

    Attributes:
        about: what it shows, for people.
        run: fills a section.
    """

    about: str
    run: Callable[[Options, Section], None]


def row_of(result: Result) -> dict[str, int]:
    """The columns that every part has."""
    return {
        "runs": result.runs,
        "repeated": len(result.repeated),
        "lost": len(result.lost),
        "stuck": len(result.stuck),
        "unknown reported": len(result.unknown),
    }


def judge(section: Section, result: Result) -> None:
    """The checks that every part has."""
    section.checks |= {
        "nothing was repeated": not result.repeated,
        "nothing was lost": not result.lost,
        "every agent ended, and nothing is unknown that can be known": not result.stuck and result.runs > 0,
    }
    section.notes += [f"repeated: {what}" for what in result.repeated[:20]]
    section.notes += [f"lost: {what}" for what in result.lost[:20]]
    section.notes += [f"stuck: {what}" for what in result.stuck[:20]]


def matrix(options: Options, section: Section) -> None:
    """Every victim, every way of coming to a point, every point, every job."""
    points = POINTS if options.full else FEW_POINTS
    whole = Result()
    for victim, mode in product(VICTIMS, MODES):
        found = Result()
        with ground() as made:
            for point in points:
                options.say(f"{victim}, {mode}, {point}")
                found.add(_column(made, victim, point, mode))
        section.rows.append({"killed": victim, "calls come": mode, **row_of(found)})
        whole.add(found)
    judge(section, whole)


def _column(made: Ground, victim: str, point: str, mode: str) -> Result:
    column = Column(made, victim, point, mode)
    try:
        return column.run()
    except AssertionError as error:
        column.result.stuck.append(f"{point}, {victim}, {mode}: {' '.join(str(error).split())[:300]}")
        column.disarm()
        return column.result


def connection(options: Options, section: Section) -> None:
    """The connection to the database cut around commits."""
    rounds = 200 if options.full else 16
    whole = Result()
    with ground() as made, cutter.cutter(made.server.dsn) as way:
        config = cutter.CONFIG.format(base=made.plain.base)
        with scene_on(way.dsn, config=config) as scene:
            for moment in cutter.MOMENTS:
                options.say(f"cut {moment}")
                held = scene.hold(allow=cutter.allowed(made.plain), files=cutter.FILES)
                found = cutter.cut_rounds(held, way, made.plain, moment, rounds)
                section.rows.append({"cut": f"{moment} the commit", **row_of(found)})
                whole.add(found)
    judge(section, whole)


def recoveries(options: Options, section: Section) -> None:
    """The database killed 0.2 s after a kernel began to take many agents over."""
    count = 250 if options.full else 30
    with ground() as made, scene_on(made.server.dsn) as scene:
        options.say(f"{count} agents")
        found = recover(scene, made.server, count)
    section.rows.append(row_of(found))
    judge(section, found)


def isolation(options: Options, section: Section) -> None:
    """Transactions on the same lists by agents of two kernels, under kills; the same without transactions as a control."""
    sizes = (
        {"agents": 12, "transactions": 60, "strikes": 60}
        if options.full
        else {"agents": 6, "transactions": 15, "strikes": 8}
    )
    for round_ in range(5 if options.full else 1):
        with lists() as scene:
            found = scene.run(options.seed + round_, **sizes, say=options.say)
            bare = scene.run(options.seed + round_, **{**sizes, "strikes": 0}, isolated=False)
        section.rows.append(
            {"round": round_, **sizes, "anomalies": len(found), "without transactions": len(bare)}
        )
        section.notes += found[:20]
    section.checks["every history has a serial order"] = not any(row["anomalies"] for row in section.rows)
    section.checks["the checker sees what bare reads and writes lose"] = all(
        row["without transactions"] for row in section.rows
    )


def instants(options: Options, section: Section) -> None:
    """Strikes at random instants, in storms of limited length."""
    whole = Result()
    struck = dict.fromkeys(STRIKES, 0)
    left, number = options.strikes, 0
    while left > 0:
        with ground() as made:
            storm = Storm(made, options.seed + number, options.say)
            whole.add(storm.run(min(left, 200)))
        for victim, times in storm.struck.items():
            struck[victim] += times
        left, number = left - 200, number + 1
    section.rows.append({**row_of(whole), **{f"{victim} killed": times for victim, times in struck.items()}})
    section.notes.append(f"seed {options.seed}")
    judge(section, whole)


def everywhere(options: Options, section: Section) -> None:
    """A scripted agent over a database, files and a keyed target, cut before and after each call."""
    whole = Result()
    for victim in cuts.VICTIMS if options.full else cuts.VICTIMS[:2]:
        with cuts.cuts() as scene:
            options.say(f"{victim}, {len(cuts.PLACES)} places")
            runs = cuts.orders(victim, cuts.PLACES)
            scene.cut(victim, runs)
            found = scene.judge(runs)
        section.rows.append({"killed": victim, **row_of(found)})
        whole.add(found)
    section.notes.append("every run's rows, files, state and deliveries have the hash of an uncut run's")
    judge(section, whole)


def ablation(options: Options, section: Section) -> None:
    """The same runs with journal and checkpoint, and started anew: the second have to be caught."""
    resumed, anew = cuts.ablation(full=options.full)
    half = len(resumed) // 2
    with cuts.cuts() as scene:
        for victim, part in (("agent", slice(half)), ("kernel", slice(half, None))):
            for at in range(0, half, 10):
                options.say(f"{victim}, {at} of {half}")
                batch = [*resumed[part][at : at + 10], *anew[part][at : at + 10]]
                scene.cut(victim, batch)
        with_it, without = scene.judge(resumed), scene.judge(anew)
    section.rows += [{"resuming": "on", **row_of(with_it)}, {"resuming": "off", **row_of(without)}]
    begun = [run for run in anew if run.place != cuts.PLACES[0]]
    judge(section, with_it)
    caught = len(without.repeated) + len(without.lost)
    section.checks["switched off, every run that had begun is caught"] = caught == len(begun) > 0
    section.notes.append(f"{len(anew) - len(begun)} of the runs without it were cut before their first call")


def clocks(options: Options, section: Section) -> None:
    """A storm in which the kernel's clock is set at every strike, and somebody dies at every other."""
    with clock_storm(options.seed, options.say) as storm:
        found = storm.run(100 if options.full else len(JUMPS))
    section.rows.append({**row_of(found), "clock set": storm.jumps})
    section.notes.append(
        f"by {', '.join(f'{jump:+.0f}' for jump in JUMPS)} s off the database's; seed {options.seed}"
    )
    judge(section, found)


PARTS = {
    "matrix": Part(about="SIGKILL at every named failpoint, for every recovery class", run=matrix),
    "cuts": Part(about="a scripted agent cut before and after each call", run=everywhere),
    "ablation": Part(about="the same runs with resuming and without", run=ablation),
    "connection": Part(about="the connection to PostgreSQL cut around commits", run=connection),
    "recoveries": Part(about="PostgreSQL killed in the middle of many recoveries", run=recoveries),
    "isolation": Part(
        about="transactions of two kernels' agents under kills, and a serial order for them", run=isolation
    ),
    "clocks": Part(
        about="the kernel's clock set by hours and years while agents and kernels die", run=clocks
    ),
    "instants": Part(about="SIGKILL at random instants", run=instants),
}
