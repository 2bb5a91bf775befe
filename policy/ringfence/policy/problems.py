"""What is wrong with a file, where, and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Problem:
    """One thing wrong with a file.

    Attributes:
        line: from 1.
        column: from 1.
        message: what is wrong, lower case, input in backticks.
        fix: what to write instead; empty where the message says it all.
    """

    line: int
    column: int
    message: str
    fix: str = ""

    def render(self, source: str) -> str:
        """One line for people: `source:line:column: what; fix`."""
        tail = f"; {self.fix}" if self.fix else ""
        return f"{source}:{self.line}:{self.column}: {self.message}{tail}"


class ManifestError(ValueError):
    """A manifest, a kernel file or a rule that can't be accepted. `str()` has one line for each problem.

    Attributes:
        problems: all that were found, in the order of the file.
        source: the file's name, as people know it.
    """

    def __init__(self, problems: Sequence[Problem], source: str) -> None:
        self.problems = sorted(problems)
        self.source = source
        super().__init__("\n".join(problem.render(source) for problem in self.problems))


class PatternError(ValueError):
    """A pattern or a resource that the grammar refuses.

    Attributes:
        message: what is wrong, lower case.
        fix: what to write instead; may be empty.
    """

    def __init__(self, message: str, fix: str = "") -> None:
        self.message = message
        self.fix = fix
        super().__init__(f"{message}; {fix}" if fix else message)
