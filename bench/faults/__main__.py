"""`python -m bench.faults`: kill everything everywhere, count effects from outside, and print what was repeated or lost."""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time

from ringfence.agent import RingfenceError
from support.kernels import Refused

from bench.faults.parts import PARTS, Options, Part
from bench.report import Section


def main() -> int:
    """Parse the command line, run the parts, print. Exit status 1: something was repeated, lost or stuck."""
    parser = argparse.ArgumentParser(prog="python -m bench.faults", description=__doc__)
    names = "\n".join(f"  {name:12}{part.about}" for name, part in PARTS.items())
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = f"parts:\n{names}"
    parser.add_argument("--full", action="store_true", help="everything; without it a few minutes")
    parser.add_argument(
        "--only", action="append", choices=list(PARTS), metavar="NAME", help="may be repeated"
    )
    parser.add_argument(
        "--strikes", type=int, metavar="N", help="random instants (default: 40, --full: 3000)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is random (default: that of the clock)")
    parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    given = parser.parse_args()
    logging.disable(logging.ERROR)  # databases that were killed are told of by their supervisors
    seed = given.seed or int(time.time())
    options = Options(
        full=given.full, seed=seed, strikes=given.strikes or (3000 if given.full else 40), say=_say
    )
    sections = [
        _one(name, PARTS[name], options, quiet=given.json) for name in PARTS if _wanted(name, given.only)
    ]
    if given.json:
        print(
            json.dumps(
                {"full": options.full, "seed": seed, "sections": [s.json() for s in sections]}, indent=2
            )
        )
    failed = [section.name for section in sections if not all(section.checks.values())]
    if failed:
        print(f"faults: failed: {', '.join(failed)}; seed {seed}", file=sys.stderr)
    return 1 if failed else 0


def _wanted(name: str, only: list[str] | None) -> bool:
    return only is None or name in only


def _one(name: str, part: Part, options: Options, *, quiet: bool) -> Section:
    began = time.monotonic()
    section = Section(name=name, title=part.about)
    try:
        part.run(options, section)
    except (AssertionError, OSError, Refused, RingfenceError) as error:
        # A run that can't go on has shown something too: what was there is told, and the whole fails.
        section.notes.append(" ".join(str(error).split())[:500])
        section.checks["it ran to its end"] = False
    section.seconds = time.monotonic() - began
    _say("")
    if not quiet:
        print(f"\n{section.text()}\n  {section.seconds:.0f} s", flush=True)
    return section


def _say(text: str) -> None:
    """One line that is written over, on a terminal only."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
