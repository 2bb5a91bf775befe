"""What the metadata of an installed distribution says, and whether its files are still what was installed."""

from __future__ import annotations

import base64
import csv
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from email.parser import HeaderParser
from pathlib import Path
from typing import Any

READ_BYTES = 1 << 20

# Looked for in this order, in lower case: a text that names several counts as the first.
FAMILIES = (
    (
        "strong copyleft",
        ("agpl", "affero general public", "gpl-2", "gpl-3", "gplv", "general public license"),
    ),
    ("weak copyleft", ("lgpl", "lesser general public", "mpl-", "mpl 2", "mozilla public", "epl-")),
    (
        "permissive",
        (
            *("mit", "apache", "bsd", "isc", "psf", "python software foundation", "zlib", "unlicense", "cc0"),
            *("postgresql", "public domain", "redistribution and use", "permission is hereby granted"),
        ),
    ),
)
WEAK = ("lgpl", "lesser general public")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One line of a RECORD: a file, and the hash and size it was installed with (None: not recorded)."""

    path: str
    algorithm: str
    digest: str | None
    size_bytes: int | None


@dataclass(slots=True, kw_only=True)
class Finding:
    """What is known of one distribution after it was checked."""

    name: str
    version: str
    licence: str
    family: str
    entries: list[Entry]
    verified: int = 0
    altered: list[str] = field(default_factory=list[str])
    missing: list[str] = field(default_factory=list[str])

    def facts(self) -> dict[str, Any]:
        """The part that others are told."""
        return {"distribution": f"{self.name}-{self.version}", "licence": self.licence, "family": self.family}


def examine(metadata: str, record: str, licence_text: str, place: str) -> Finding:
    """Read metadata, find the licence, and hash every file that the RECORD names.

    Args:
        metadata: text of METADATA.
        record: text of RECORD.
        licence_text: the beginning of a licence file, empty where there is none.
        place: directory that the paths of the RECORD are relative to.
    """
    headers = HeaderParser().parsestr(metadata)
    licence = licence_of(
        str(headers.get("License-Expression") or ""),
        str(headers.get("License") or ""),
        [str(line) for line in headers.get_all("Classifier") or ()],
        licence_text,
    )
    finding = Finding(
        name=str(headers.get("Name") or "unknown"),
        version=str(headers.get("Version") or "0"),
        licence=licence,
        family=family_of(licence),
        entries=list(entries_of(record)),
    )
    for entry in finding.entries:
        if entry.digest is not None:
            _check(finding, entry, Path(place))
    return finding


def entries_of(record: str) -> Iterator[Entry]:
    """The lines of a RECORD, each path once."""
    seen: set[str] = set()
    for line in csv.reader(record.splitlines()):
        path, hashed, size = (*line, "", "", "")[:3]
        if not path or path in seen:
            continue
        seen.add(path)
        algorithm, _, encoded = hashed.partition("=")
        yield Entry(
            path=path,
            algorithm=algorithm,
            digest=base64.urlsafe_b64decode(encoded + "=" * (-len(encoded) % 4)).hex() if encoded else None,
            size_bytes=int(size) if size.isdecimal() else None,
        )


def _check(finding: Finding, entry: Entry, place: Path) -> None:
    digest = hashlib.new(entry.algorithm)
    try:
        with (place / entry.path).open("rb") as file:
            while part := file.read(READ_BYTES):
                digest.update(part)
    except OSError:
        finding.missing.append(entry.path)
        return
    if digest.hexdigest() == entry.digest:
        finding.verified += 1
    else:
        finding.altered.append(entry.path)


def licence_of(expression: str, field_text: str, classifiers: Sequence[str], licence_text: str) -> str:
    """The licence in one line: an SPDX expression, else a short field, else a classifier, else the text's title."""
    if expression:
        return expression
    first, *more = field_text.strip().splitlines() or [""]
    if first and not more and first.lower() not in {"unknown", "dual license"}:
        return first.strip()
    named = [line.rpartition(" :: ")[2] for line in classifiers if line.startswith("License :: ")]
    named = [name for name in named if name != "OSI Approved"]
    if named:
        return " / ".join(named)
    title = next((line.strip(" #*=") for line in licence_text.splitlines() if line.strip(" #*=")), "")
    return title[:80] or "not stated"


def family_of(licence: str) -> str:
    """Permissive, weak copyleft, strong copyleft, or unknown."""
    text = licence.lower()
    for family, words in FAMILIES:
        if any(word in text for word in words):
            if family == "strong copyleft" and any(word in text for word in WEAK):
                return "weak copyleft"
            return family
    return "unknown"


def cache_is_current(header: bytes, source_size: int, source_mtime: int) -> bool:
    """Whether a compiled file belongs to a source of this size and time (PEP 552: flags, time, size)."""
    flags = int.from_bytes(header[4:8], "little")
    if flags & 1:
        return bool(flags & 2 == 0)  # checked by hash only if asked; nothing to compare with here
    size = int.from_bytes(header[12:16], "little")
    mtime = int.from_bytes(header[8:12], "little")
    return (size, mtime) == (source_size & 0xFFFFFFFF, source_mtime & 0xFFFFFFFF)


def source_of(cache: str) -> str:
    """The source that a compiled file was made of: `a/__pycache__/b.cpython-311.pyc` comes from `a/b.py`."""
    folder, _, name = cache.rpartition("/")
    return f"{folder.rpartition('/')[0]}/{name.partition('.')[0]}.py"


def report(rows: Sequence[dict[str, Any]], shared: Sequence[dict[str, Any]], cleaned: dict[str, int]) -> str:
    """The report that people read, from what the database holds."""
    families: dict[str, int] = {}
    for row in rows:
        families[row["family"]] = families.get(row["family"], 0) + 1
    verified, odd = sum(row["verified"] for row in rows), [r for r in rows if r["altered"] or r["missing"]]
    lines = [
        "# Software installed here",
        "",
        f"{len(rows)} distributions, {verified} files hashed and equal to what was installed.",
        "",
        "## Licences",
        "",
        *(f"- {family}: {families[family]}" for family in sorted(families)),
        "",
        "## To look at",
        "",
        *(f"- {r['name']} {r['version']}: {r['altered']} altered, {r['missing']} missing" for r in odd),
        *(
            f"- {r['name']} {r['version']}: its licence is `{r['licence']}`"
            for r in rows
            if r["family"] == "unknown"
        ),
        *(["- nothing"] if not odd and "unknown" not in families else []),
        "",
        "## The same file in several distributions",
        "",
        *(f"- {row['copies']} copies of {row['example']} ({row['size_bytes']} bytes)" for row in shared),
        *(["- none"] if not shared else []),
        "",
        "## Cleaned up",
        "",
        f"- {cleaned['rows']} rows about files that nothing vouches for",
        f"- {cleaned['directories']} directories of stale caches",
        "",
        "## All distributions",
        "",
        "| distribution | version | licence | family | verified | shared |",
        "|---|---|---|---|---|---|",
        *(
            f"| {r['name']} | {r['version']} | {r['licence']} | {r['family']} | {r['verified']} | {r['shared']} |"
            for r in rows
        ),
        "",
    ]
    return "\n".join(lines)
