"""What is allowed in a file and still not what its author may think: rules that say nothing, are too wide, or guard less than they seem to.

Nothing here decides. A warning may be wrong about what somebody wants; it is never wrong about what a rule does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ringfence.policy.actions import CHANGING, KNOWN_ACTIONS, OWN_ACTIONS, RESOURCE, applies, match_action
from ringfence.policy.conditions import Condition, Environment, Share, Tainted
from ringfence.policy.hearsay import SOURCES, Hearsay
from ringfence.policy.kernel_file import KernelFile
from ringfence.policy.lint_places import misplaced
from ringfence.policy.lint_rules import disguised, lookalikes, other_cases, too_wide, weak_denies
from ringfence.policy.lint_undo import without_return
from ringfence.policy.manifest_types import Manifest
from ringfence.policy.problems import Problem
from ringfence.policy.rules import Rule, Rules
from ringfence.policy.types import Verdict


def lint_manifest(manifest: Manifest, file: KernelFile | None = None) -> list[Problem]:
    """Warnings about a manifest, in the order of its lines.

    Args:
        manifest: what was read without a problem.
        file: the operator's file that it will run under; None: what depends on it is not looked at.
    """
    rules = manifest.rules
    inherited = [] if file is None else [r for role in manifest.roles for r in file.roles.get(role, Rules())]
    known = file is not None or not manifest.roles
    found = [*_rules(rules), *weak_denies(rules, [*rules, *inherited])]
    found += [*other_cases(rules, [*rules, *inherited]), *_direct(manifest), *_ignored(manifest)]
    allows = [rule for rule in (*rules, *inherited) if rule.verdict is not Verdict.DENY]
    totals = set(manifest.budgets.total)
    if file is not None:
        totals |= set(file.ceilings.budgets.total)
    found += _conditions(manifest.when, allows if known else None, totals)
    if file is not None:
        found += _against(manifest, file)
    return sorted(set(found))


def lint_kernel_file(file: KernelFile) -> list[Problem]:
    """Warnings about the operator's file, in the order of its lines."""
    found: list[Problem] = []
    for name, role in file.declared_roles.items():
        found += [*_rules(role.rules), *weak_denies(role.rules, file.roles[name])]
        found += other_cases(role.rules, file.roles[name])
        found += _conditions(role.when, None, None)
        found += without_return(list(role.rules.allow), file)
        for rule in (*role.rules.allow, *role.rules.ask):
            above = next((deny for deny in file.ceilings.deny if _covers(deny, rule)), None)
            if above is not None:
                what = f"the rule `{rule.text}` can never have a say: `{above.text}` of the ceilings denies all of it"
                found.append(_at(rule, what, "remove it"))
    ceilings = Rules(deny=file.ceilings.deny, ask=file.ceilings.ask)
    found += [*_rules(ceilings), *weak_denies(ceilings, ())]
    found += _conditions(file.ceilings.when, None, None)
    whens = [*file.ceilings.when, *(item for role in file.declared_roles.values() for item in role.when)]
    found += _labels(whens, file)
    if file.untaint and not _taints(file):
        first = file.untaint[0]
        text = "no resource is `untrusted` and there are no hooks, so nothing is ever tainted"
        found.append(_at(first, text, "mark the resource"))
    found += _people(file)
    for declared in file.resources.values():
        if declared.type in {"http", "llm"} and declared.auth is not None and _in_clear(declared.base):
            what = f"the credential of `{declared.name}` is sent over `http://` in the clear"
            found.append(Problem(line=declared.line, column=1, message=what, fix="use `https://`"))
    return sorted(set(found))


def _taints(file: KernelFile) -> bool:
    """Whether anything from outside taints whoever reads it: answers of a resource, or messages of a hook."""
    return any(one.untrusted for one in file.resources.values()) or bool(
        file.callback and file.callback.hooks
    )


def _people(file: KernelFile) -> list[Problem]:
    """A warning where more people have to approve than there can be: everybody at the operator socket is one."""
    people = [] if file.callback is None else list(file.callback.people.values())
    there = len(people) + (not any(one.account for one in people))
    wanted = file.ceilings.people
    if wanted.number <= there:
        return []
    what = f"{wanted.number} people have to approve, and the kernel can tell {there} apart, so what needs them is never approved"
    return [Problem(line=wanted.line, column=1, message=what, fix="name people under `callback`")]


def _in_clear(base: str) -> bool:
    host = base.removeprefix("http://").partition("/")[0].rpartition(":")[0] or base.removeprefix("http://")
    return base.startswith("http://") and not host.startswith(("127.", "localhost", "[::1"))


def _at(place: Rule | Condition, message: str, fix: str = "") -> Problem:
    return Problem(line=place.line, column=place.column, message=message, fix=fix)


def _rules(rules: Rules) -> Iterator[Problem]:
    yield from _needless(rules)
    for rule in rules.allow:
        yield from too_wide(rule)
    for rule in rules:
        yield from lookalikes(rule)
        yield from disguised(rule)


def _covers(wide: Rule, narrow: Rule) -> bool:
    """Whether a rule says the same or more about all that another one speaks of. Sound, not complete."""
    forbids = wide.verdict is not Verdict.ALLOW
    if not applies(wide.action_pattern, narrow.action_pattern, forbids=forbids):
        return False
    return all(any(mine.covers(theirs) for mine in wide.compiled()) for theirs in narrow.compiled())


def _direct(manifest: Manifest) -> Iterator[Problem]:
    """A program that writes its files itself, where nothing lets it."""
    if manifest.sandbox.workspace != "direct" or manifest.roles:
        return
    if not any(_allows(rule, "fs.write") for rule in (*manifest.rules.allow, *manifest.rules.ask)):
        text = "nothing allows `fs.write`, so a `direct` program fails with the first file that it changes"
        yield Problem(
            line=1, column=1, message=text, fix='allow it where it may write: `fs.write: "/workspace/out/**"`'
        )


def _ignored(manifest: Manifest) -> Iterator[Problem]:
    """Calls that change something, and that are taken for recorded ones which they are not in all."""
    for one in manifest.restart.ignore:
        tools = one.action.startswith("mcp.") and not one.action.endswith(f".{RESOURCE}")
        if one.action in CHANGING or tools:
            may = "may change" if tools else "change"
            text = (
                f"calls of `{one.action}` {may} something, and after a restart one that differs from a recorded one in what is "
                "ignored gets its answer and is not made"
            )
            fix = "ignore only what their effect does not depend on, such as an id of the request, or leave it out"
            yield Problem(line=one.line, column=one.column, message=text, fix=fix)


def _needless(rules: Rules) -> Iterator[Problem]:
    """Rules that another one makes needless."""
    for group in (rules.allow, rules.ask, rules.deny):
        for nr, rule in enumerate(group):
            for other_nr, other in enumerate(group):
                same = _covers(rule, other)
                if nr != other_nr and _covers(other, rule) and (not same or other_nr < nr):
                    text = f"the rule `{rule.text}` says nothing that `{other.text}` on line {other.line} does not say"
                    yield _at(rule, text, "remove it")
                    break
    for rule in rules.allow:
        asks = next((ask for ask in rules.ask if _covers(ask, rule)), None)
        if asks is not None:
            text = f"what `{rule.text}` allows is always asked: `{asks.text}` on line {asks.line} covers all of it"
            yield _at(rule, text, "narrow one of the two, or leave it as it is")


def _conditions(
    whens: Sequence[Condition], allows: Sequence[Rule] | None, totals: set[str] | None
) -> Iterator[Problem]:
    """Conditions that can't hold, always hold, or guard less than they seem to.

    Args:
        whens: of one file.
        allows: all that allows something, or asks about it; None: it isn't known.
        totals: totals with a limit; None: they aren't known.
    """
    for item in whens:
        for test in item.tests:
            if isinstance(test, Share) and not test.of and totals is not None and test.total not in totals:
                text = f"the budget `{test.total}` has no limit, so the condition always matches"
                yield _at(item, text, f"add `budgets: {{total: {{{test.total}: N}}}}`")
            yield from (_at(item, text, fix) for text, fix in misplaced(item.action, test))
        if allows is None:
            continue
        spoken = [a for a in KNOWN_ACTIONS if applies(item.action, a, forbids=True)] or [item.action]
        if not any(_allows(rule, action) for rule in allows for action in spoken):
            text = f"nothing allows `{item.action}`, so the condition `{item.text}` never matters"
            yield _at(item, text, "remove it, or allow the action")
        for rule in item.of:
            if not any(_reaches(allow, rule) for allow in allows):
                text = f"nothing allows to read `{rule.text}`, so every call that needs it fresh is refused"
                yield _at(item, text, "allow the read")
        yield from _gaps(item, whens, allows)


def _allows(rule: Rule, action: str) -> bool:
    return applies(rule.action_pattern, action, forbids=False) and action not in OWN_ACTIONS


def _reaches(allow: Rule, wanted: Rule) -> bool:
    """Whether an allow may let through something that a pattern names; sure only where it says no."""
    if allow.kind not in {wanted.kind, "any"}:
        return False
    return match_action(allow.action_pattern, wanted.action_pattern) or any(
        match_action(allow.action_pattern, action) and match_action(wanted.action_pattern, action)
        for action in KNOWN_ACTIONS
    )


_SENDING = ("http.post", "http.put", "http.patch", "http.delete")


def _gaps(item: Condition, whens: Sequence[Condition], allows: Sequence[Rule]) -> Iterator[Problem]:
    """Doors beside the one that a condition on taint shuts."""
    if Tainted() in item.tests and item.action in _SENDING:
        guarded = [one.action for one in whens if Tainted() in one.tests]
        open_ones = [
            action
            for action in _SENDING
            if any(_allows(rule, action) for rule in allows)
            and not any(match_action(one, action) for one in guarded)
        ]
        if open_ones:
            text = f"a tainted thread may still send with {', '.join(f'`{a}`' for a in open_ones)}"
            yield _at(item, text, "write `action: http.*`")
    if any(applies(item.action, a, forbids=True) for a in ("fs.read",)) and any(
        _allows(rule, "exec.run") for rule in allows
    ):
        text = "a condition on `fs.read` hides nothing from the commands of `exec.run`"
        yield _at(item, text, "add one on `exec.run`, or deny the path")


def _labels(whens: Iterable[Condition], file: KernelFile) -> Iterator[Problem]:
    declared = {resource.environment for resource in file.resources.values()} - {""}
    untrusted = _taints(file)
    vouches = [one for resource in file.resources.values() for one in resource.vouches]
    vouched = {said.name for one in vouches for said in one.said} - {""}
    for item in whens:
        for test in item.tests:
            if isinstance(test, Environment) and not declared.intersection(test.names):
                known = ", ".join(sorted(declared)) or "none"
                text = f"no resource has the environment `{', '.join(test.names)}`, so the condition can never hold"
                yield _at(item, text, f"declared: {known}")
            if isinstance(test, Tainted) and not untrusted:
                text = "no resource is `untrusted`, so the condition holds only by what others wrote"
                yield _at(item, text, "mark resources whose answers anyone can write with `untrusted: true`")
            for name in test.vouched_by if isinstance(test, Hearsay) else ():
                if name not in (*SOURCES, *vouched):
                    text = f"no resource vouches for anything as `{name}`, so nobody is known by it"
                    yield _at(item, text, f"declared: {', '.join(sorted(vouched)) or 'none'}")


def _against(manifest: Manifest, file: KernelFile) -> Iterator[Problem]:
    """What a manifest says in vain under an operator's file."""
    yield from _labels(manifest.when, file)
    for rule in (*manifest.rules.allow, *manifest.rules.ask):
        above = next((deny for deny in file.ceilings.deny if _covers(deny, rule)), None)
        if above is not None:
            text = f"the rule `{rule.text}` can never have a say: the ceilings deny `{above.text}`"
            yield _at(rule, text, "remove it")
        yield from _undeclared(rule, file)
    yield from without_return(list(manifest.rules.allow), file)
    for role in manifest.roles:
        if role not in file.roles:
            known = ", ".join(sorted(file.roles)) or "none"
            text = f"the kernel file declares no role `{role}`"
            yield Problem(line=1, column=1, message=text, fix=f"declared: {known}")


def _undeclared(rule: Rule, file: KernelFile) -> Iterator[Problem]:
    if rule.kind == "table":
        names = [n for n, resource in file.resources.items() if resource.type == "postgres"]
        for pattern in rule.patterns:
            database = pattern.partition("/")[0]
            if "*" not in database and database not in names:
                text = f"the kernel file declares no database `{database}`, so `{rule.text}` can never match"
                yield _at(rule, text, f"declared: {', '.join(sorted(names)) or 'none'}")
    labels = rule.action_pattern.split(".")
    if labels[0] == "a2a":
        peers = [n for n, resource in file.resources.items() if resource.type == "a2a"]
        for pattern in rule.patterns:
            if "*" not in pattern and pattern not in peers:
                text = f"the kernel file declares no A2A agent `{pattern}`, so `{rule.text}` can never match"
                yield _at(rule, text, f"declared: {', '.join(sorted(peers)) or 'none'}")
    if labels[0] == "mcp" and labels[1] != "*":
        servers = [n for n, resource in file.resources.items() if resource.type == "mcp"]
        if labels[1] not in servers:
            text = f"the kernel file declares no MCP server `{labels[1]}`, so `{rule.text}` can never match"
            yield _at(rule, text, f"declared: {', '.join(sorted(servers)) or 'none'}")
