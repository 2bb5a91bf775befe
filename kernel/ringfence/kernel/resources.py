"""The operator's `ringfence.yaml` in force: declared resources with their secrets filled in.

A resource whose secret is not there stays declared and is unavailable: every call on it is refused with what is missing.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ringfence.kernel.secrets import NoSuchSecret, Secrets, SecretsError
from ringfence.policy.kernel_file import KernelFile, parse_kernel_file
from ringfence.policy.problems import ManifestError
from ringfence.policy.resources import ResourceDecl, SecretRef
from ringfence.syscalls.base import Effect
from ringfence.syscalls.declared import HttpResource, HttpUndo, LlmResource, SqlResource
from ringfence.syscalls.sql_target.session import secrets_of

_HEADER_VALUE = re.compile(r"[\x20-\x7e]+")

EMPTY_FILE = "apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n"


class ResourceError(Exception):
    """The file can't be used; the message says why and how to mend it."""


class _SecretMissing(Exception):
    """A resource can't have its secret; the message says why and how to mend it."""


@dataclass(slots=True, kw_only=True)
class Resources:
    """What is in force. A failed reload changes nothing but `error`.

    Agents hold `http` and `sql` themselves, so what `fill` puts there counts from their next call on.
    """

    path: Path | None
    file: KernelFile
    loaded_at: datetime
    error: str = ""
    http: dict[str, HttpResource] = field(default_factory=dict[str, HttpResource])
    sql: dict[str, SqlResource] = field(default_factory=dict[str, SqlResource])
    llm: dict[str, LlmResource] = field(default_factory=dict[str, LlmResource])

    @classmethod
    def load(cls, path: Path | None, secrets: Secrets, embedded: Mapping[str, str]) -> Resources:
        """Read and resolve the file.

        Args:
            path: the file; None: no resources.
            secrets: values of `{secret: NAME}` references.
            embedded: DSNs of databases in the embedded server by name.

        Raises:
            ResourceError: it can't be read or is wrong; every problem has its line and column. A secret that is not
                there is no error: its resource is unavailable.
        """
        text, source = EMPTY_FILE, "(none)"
        if path is not None:
            try:
                text, source = path.read_text(encoding="utf-8"), str(path)
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ResourceError(
                    f"the kernel file `{path}` can't be read: {str(why).lower()}; check the path"
                ) from error
        try:
            file = parse_kernel_file(text, source)
        except ManifestError as error:
            raise ResourceError(str(error)) from error
        found = cls(path=path, file=file, loaded_at=datetime.now(UTC))
        for name, declared in file.resources.items():
            if declared.type == "http":
                found.http[name] = _http(declared, secrets)
            elif declared.type == "postgres":
                found.sql[name] = _sql(declared, secrets, embedded)
            else:
                found.llm[name] = _llm(declared, secrets)
        return found

    def fill(self, secret: str, secrets: Secrets) -> list[str]:
        """Take over a secret that was set or removed, in every resource that names it; returns their names."""
        changed: list[str] = []
        for name, declared in self.file.resources.items():
            if secret not in declared.secrets():
                continue
            if declared.type == "http":
                self.http[name] = _http(declared, secrets)
            elif declared.type == "postgres":
                self.sql[name] = _sql(declared, secrets, {})
            else:
                self.llm[name] = _llm(declared, secrets)
            changed.append(name)
        return changed

    def unavailable(self) -> list[dict[str, str]]:
        """Resources that no call can use, each with the reason and what to do."""
        found: list[HttpResource | SqlResource | LlmResource] = [
            *self.http.values(),
            *self.sql.values(),
            *self.llm.values(),
        ]
        return [
            {"name": resource.name, "reason": resource.unavailable}
            for resource in sorted(found, key=lambda item: item.name)
            if resource.unavailable
        ]


def embedded_names(path: Path) -> list[str]:
    """Databases that the file wants in the embedded server; an unreadable or wrong file is reported by `load`."""
    try:
        file = parse_kernel_file(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeDecodeError, ManifestError):
        return []
    return [declared.name for declared in file.resources.values() if declared.embedded]


def _reveal(value: str | SecretRef, secrets: Secrets) -> str:
    """A literal, or the secret it names."""
    if isinstance(value, str):
        return value
    name = value.secret
    hint = f"the operator sets it: ringfence secrets set {name}"
    try:
        text = secrets.get(name).decode("utf-8").strip()
    except NoSuchSecret:
        raise _SecretMissing(f"secret `{name}` is not set; {hint}") from None
    except SecretsError as error:
        raise _SecretMissing(f"{error}; {hint}") from None
    except UnicodeDecodeError:
        raise _SecretMissing(f"secret `{name}` is no UTF-8 text; {hint}") from None
    if not text:
        raise _SecretMissing(f"secret `{name}` holds nothing but blanks; {hint}")
    return text


def _llm(declared: ResourceDecl, secrets: Secrets) -> LlmResource:
    try:
        headers, hidden = _credential(declared, secrets)
        unavailable = ""
    except _SecretMissing as error:
        headers, hidden, unavailable = {}, [], str(error)
    return LlmResource(
        name=declared.name,
        base=declared.base,
        headers=headers,
        models=declared.models,
        price_input=declared.price_input,
        price_output=declared.price_output,
        max_output=declared.max_output,
        limit_key=declared.limit_key,
        tokenizers=declared.tokenizers,
        external=declared.effect == "external",
        untrusted=declared.untrusted,
        timeout_s=declared.timeout_s,
        addresses=declared.addresses,
        rate=declared.rate,
        secrets=tuple(hidden),
        unavailable=unavailable,
    )


def _http(declared: ResourceDecl, secrets: Secrets) -> HttpResource:
    try:
        headers, hidden = _credential(declared, secrets)
        unavailable = ""
    except _SecretMissing as error:
        headers, hidden, unavailable = {}, [], str(error)
    return HttpResource(
        name=declared.name,
        base=declared.base,
        headers=headers,
        effects=tuple((e.method, e.path, Effect[e.effect.upper()]) for e in declared.effects),
        vouches=tuple((v.method, v.path, v.said) for v in declared.vouches),
        undo=tuple(
            HttpUndo(
                method=one.method,
                path=one.path,
                keep=one.keep.parts,
                put_back_method=one.put_back.method,
                put_back=one.put_back.parts,
            )
            for one in declared.undo
        ),
        idempotency_header=declared.idempotency_header or None,
        timeout_s=declared.timeout_s,
        addresses=declared.addresses,
        rate=declared.rate,
        untrusted=declared.untrusted,
        secrets=tuple(hidden),
        unavailable=unavailable,
    )


def _credential(declared: ResourceDecl, secrets: Secrets) -> tuple[dict[str, str], list[str]]:
    """Headers that authenticate, and what of them must never show."""
    headers: dict[str, str] = {}
    hidden: list[str] = []
    if declared.auth is not None:
        value = _reveal(declared.auth.value, secrets)
        hidden.append(value)
        if declared.auth.scheme == "basic":
            pair = base64.b64encode(f"{declared.auth.username}:{value}".encode()).decode()
            hidden.append(pair)
            headers["Authorization"] = f"Basic {pair}"
        elif declared.auth.scheme == "bearer":
            headers["Authorization"] = f"Bearer {value}"
        else:
            headers[declared.auth.header] = value
        if not all(_HEADER_VALUE.fullmatch(value) for value in headers.values()):
            name = declared.auth.value.secret
            raise _SecretMissing(
                f"secret `{name}` holds a line break or a character that no header can carry; "
                f"the operator sets it: ringfence secrets set {name}"
            )
    return headers, hidden


def _sql(declared: ResourceDecl, secrets: Secrets, embedded: Mapping[str, str]) -> SqlResource:
    if declared.embedded:
        if declared.name not in embedded:
            text = f"resource `{declared.name}` wants the embedded PostgreSQL, but this kernel runs on --dsn; give it a `dsn`"
            raise ResourceError(text)
        dsn = embedded[declared.name]
        return SqlResource(name=declared.name, dsn=dsn, untrusted=declared.untrusted)
    try:
        dsn = _reveal(declared.dsn, secrets)
        # INVARIANT: what is no connection string is never handed to the driver, whose error would quote it.
        hidden = secrets_of(dsn)
        return SqlResource(name=declared.name, dsn=dsn, untrusted=declared.untrusted, secrets=hidden)
    except ValueError as error:
        where = f"secret `{declared.dsn.secret}`" if isinstance(declared.dsn, SecretRef) else "its `dsn`"
        return SqlResource(name=declared.name, dsn="", unavailable=f"{where} can't be used: {error}")
    except _SecretMissing as error:
        return SqlResource(name=declared.name, dsn="", unavailable=str(error))
