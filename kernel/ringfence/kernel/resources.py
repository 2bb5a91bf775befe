"""The operator's `ringfence.yaml` in force: declared resources with their secrets filled in.

A resource whose secret is not there stays declared and is unavailable: every call on it is refused with what is missing.
"""

from __future__ import annotations

import base64
import errno
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from ringfence.kernel.secrets import NoSuchSecret, Secrets, SecretsError
from ringfence.policy.approving import People
from ringfence.policy.kernel_file import KernelFile, parse_kernel_file
from ringfence.policy.manifest_types import Budgets
from ringfence.policy.problems import ManifestError
from ringfence.policy.resources import ResourceDecl, SecretRef
from ringfence.policy.strict_yaml import MAX_BYTES
from ringfence.policy.undoing import UndoDecl
from ringfence.syscalls.base import Effect
from ringfence.syscalls.declared import (
    A2aResource,
    HttpResource,
    HttpUndo,
    LlmResource,
    McpResource,
    ObjectResource,
    SqlResource,
)
from ringfence.syscalls.drivers.patience import Patient
from ringfence.syscalls.drivers.registry import BadOptions, open_driver
from ringfence.syscalls.redaction import redactor_of
from ringfence.syscalls.sql_target.session import secrets_of

_HEADER_VALUE = re.compile(r"[\x20-\x7e]+")

EMPTY_FILE = "apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n"
NOTHING = "{apiVersion: ringfence/v1, kind: Kernel, spec: {}}"


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
    objects: dict[str, ObjectResource] = field(default_factory=dict[str, ObjectResource])
    mcp: dict[str, McpResource] = field(default_factory=dict[str, McpResource])
    a2a: dict[str, A2aResource] = field(default_factory=dict[str, A2aResource])

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
                text, source = _text_of(path), str(path)
            except (OSError, UnicodeDecodeError) as error:
                why = error.strerror if isinstance(error, OSError) else "it is not UTF-8 text"
                raise ResourceError(
                    f"the kernel file `{path}` can't be read: {str(why).lower()}; check the path"
                ) from error
        try:
            file = parse_kernel_file(text, source)
        except ManifestError as error:
            hint = "" if _says_something(text) else f"; one that declares nothing on purpose has `{NOTHING}`"
            raise ResourceError(f"{error}{hint}") from error
        found = cls(path=path, file=file, loaded_at=datetime.now(UTC))
        for declared in file.resources.values():
            found._take(declared, secrets, embedded)
        return found

    def _take(self, declared: ResourceDecl, secrets: Secrets, embedded: Mapping[str, str]) -> None:
        """Resolve one declaration and put it in force."""
        name = declared.name
        if declared.type == "http":
            self.http[name] = _http(declared, secrets)
        elif declared.type == "postgres":
            self.sql[name] = _sql(declared, secrets, embedded)
        elif declared.type == "object":
            self.objects[name] = _objects(declared, secrets)
        elif declared.type == "mcp":
            self.mcp[name] = _mcp(declared, secrets)
        elif declared.type == "a2a":
            self.a2a[name] = _a2a(declared, secrets)
        else:
            self.llm[name] = _llm(declared, secrets)

    def fill(self, secret: str, secrets: Secrets) -> list[str]:
        """Take over a secret that was set or removed, in every resource that names it; returns their names."""
        changed: list[str] = []
        for name, declared in self.file.resources.items():
            if secret not in declared.secrets():
                continue
            self._take(declared, secrets, {})
            changed.append(name)
        return changed

    def unavailable(self) -> list[dict[str, str]]:
        """Resources that no call can use, each with the reason and what to do."""
        found = [
            *(*self.http.values(), *self.sql.values(), *self.llm.values()),
            *(*self.objects.values(), *self.mcp.values(), *self.a2a.values()),
        ]
        return [
            {"name": resource.name, "reason": resource.unavailable}
            for resource in sorted(found, key=lambda item: item.name)
            if resource.unavailable
        ]


def _text_of(path: Path) -> str:
    """The text of a kernel file; never waits for what is no file, such as a pipe.

    Raises:
        OSError: it can't be read.
        UnicodeDecodeError: it is no text.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file")
        # One byte more than the parser takes, so that it says how much is too much.
        return file.read(MAX_BYTES + 1).decode("utf-8")


def _says_something(text: str) -> bool:
    lines = (line.strip() for line in text.splitlines())
    return any(line and not line.startswith("#") and line.strip("-.") for line in lines)


def given_up(old: KernelFile, new: KernelFile) -> list[str]:
    """What ceilings denied, asked or narrowed under one file and don't under another, as text."""
    kept = {(str(rule.verdict), rule.text) for rule in new.ceilings.rules}
    lost = [
        f"{rule.verdict} {rule.text}"
        for rule in old.ceilings.rules
        if (str(rule.verdict), rule.text) not in kept
    ]
    conditions = {condition.text for condition in new.ceilings.when}
    lost += [f"when {one.text}" for one in old.ceilings.when if one.text not in conditions]
    if old.ceilings.budgets != new.ceilings.budgets and new.ceilings.budgets == Budgets():
        lost.append("budgets")
    if old.ceilings.people != new.ceilings.people and new.ceilings.people == People():
        lost.append("approvals")
    return lost


def embedded_names(path: Path) -> list[str]:
    """Databases that the file wants in the embedded server; an unreadable or wrong file is reported by `load`."""
    try:
        file = parse_kernel_file(_text_of(path), str(path))
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
    headers, hidden, unavailable = _login(declared, secrets)
    return LlmResource(
        name=declared.name,
        base=declared.base,
        headers=headers,
        models=declared.models,
        protocol=declared.protocol,
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


def _objects(declared: ResourceDecl, secrets: Secrets) -> ObjectResource:
    options: dict[str, str | int | bool] = {}
    hidden: list[str] = []
    driver, unavailable = None, ""
    try:
        for name, value in declared.options:
            options[name] = _reveal(value, secrets) if isinstance(value, SecretRef) else value
            hidden += [str(options[name])] if isinstance(value, SecretRef) else []
        driver = Patient(open_driver(declared.driver, options), declared.timeout_s)
    except _SecretMissing as error:
        unavailable = str(error)
    except BadOptions as error:
        # INVARIANT: a driver may quote what it was given.
        unavailable = f"{redactor_of(hidden).text(str(error))}; mend it in the kernel file"
    return ObjectResource(
        name=declared.name,
        driver=driver,
        untrusted=declared.untrusted,
        keep_max=declared.keep_max,
        timeout_s=declared.timeout_s,
        secrets=tuple(hidden),
        unavailable=unavailable,
    )


def _mcp(declared: ResourceDecl, secrets: Secrets) -> McpResource:
    headers: dict[str, str] = {}
    hidden: list[str] = []
    env: dict[str, str] = {}
    unavailable = ""
    try:
        headers, hidden = _credential(declared, secrets)
        for name, value in declared.mcp.env:
            env[name] = _reveal(value, secrets)
            hidden += [env[name]] if isinstance(value, SecretRef) else []
    except _SecretMissing as error:
        headers, hidden, env, unavailable = {}, [], {}, str(error)
    return McpResource(
        name=declared.name,
        base=declared.base,
        headers=headers,
        command=declared.mcp.command,
        files=declared.mcp.files,
        env=env,
        box=declared.mcp.box,
        tools=declared.mcp.tools,
        untrusted=declared.untrusted,
        timeout_s=declared.timeout_s,
        addresses=declared.addresses,
        rate=declared.rate,
        secrets=tuple(hidden),
        unavailable=unavailable,
    )


def _a2a(declared: ResourceDecl, secrets: Secrets) -> A2aResource:
    headers, hidden, unavailable = _login(declared, secrets)
    return A2aResource(
        name=declared.name,
        base=declared.base,
        headers=headers,
        skills=declared.a2a.skills,
        repeat=declared.a2a.repeat,
        card=declared.a2a.card,
        untrusted=declared.untrusted,
        timeout_s=declared.timeout_s,
        addresses=declared.addresses,
        rate=declared.rate,
        secrets=tuple(hidden),
        unavailable=unavailable,
    )


def _http(declared: ResourceDecl, secrets: Secrets) -> HttpResource:
    headers, hidden, unavailable = _login(declared, secrets)
    return HttpResource(
        name=declared.name,
        base=declared.base,
        headers=headers,
        effects=tuple((e.method, e.path, Effect[e.effect.upper()]) for e in declared.effects),
        vouches=tuple((v.method, v.path, v.said) for v in declared.vouches),
        undo=tuple(map(_undo, declared.undo)),
        idempotency_header=declared.idempotency_header or None,
        timeout_s=declared.timeout_s,
        addresses=declared.addresses,
        rate=declared.rate,
        untrusted=declared.untrusted,
        secrets=tuple(hidden),
        unavailable=unavailable,
    )


def _undo(one: UndoDecl) -> HttpUndo:
    call = one.compensate
    return HttpUndo(
        method=one.method,
        path=one.path,
        keep=() if one.keep is None else one.keep.parts,
        put_back_method="" if one.put_back is None else one.put_back.method,
        put_back=() if one.put_back is None else one.put_back.parts,
        remove=() if one.remove is None else one.remove.parts,
        compensate_method="" if call is None else call.method,
        compensate=() if call is None else call.parts,
        body=one.body,
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


def _login(declared: ResourceDecl, secrets: Secrets) -> tuple[dict[str, str], list[str], str]:
    """The same, and why it can't be had; empty: it can."""
    try:
        return *_credential(declared, secrets), ""
    except _SecretMissing as error:
        return {}, [], str(error)


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
