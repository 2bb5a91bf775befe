"""Rules and declarations about calls that destroy something behind which there is no way back."""

from __future__ import annotations

from collections.abc import Iterator

from ringfence.policy.actions import applies
from ringfence.policy.canonical import canonical_url
from ringfence.policy.kernel_file import KernelFile
from ringfence.policy.matcher import compile_pattern
from ringfence.policy.patterns import AnyPattern, UrlPattern
from ringfence.policy.problems import PatternError, Problem
from ringfence.policy.resources import METHODS, EffectDecl, ResourceDecl
from ringfence.policy.rules import Rule


def final_effects(resource: ResourceDecl) -> Iterator[EffectDecl]:
    """What an HTTP resource says is destroyed and not how that is undone. Sound, not complete: it looks at whole patterns."""
    for effect in resource.effects if resource.type == "http" else ():
        here = _pattern(resource, effect.path)
        undone = here is not None and any(
            one.method in ("*", effect.method) and _covers(_pattern(resource, one.path), here)
            for one in resource.undo
        )
        if effect.effect == "destroy" and not undone:
            yield effect


def without_return(allows: list[Rule], file: KernelFile) -> Iterator[Problem]:
    """Rules that allow what destroys and can't be undone: each such call is asked about all the same."""
    for rule in allows:
        for name, resource in sorted(file.resources.items()):
            final = next((one for one in final_effects(resource) if _reaches(rule, resource, one)), None)
            if final is not None:
                text = (
                    f"`{rule.text}` allows `{final.method} {final.path}` of `{name}`, which destroys and can't be undone: every "
                    "such call is asked about"
                )
                fix = f"declare `undo` of `{name}` in the kernel file, or write the rule under `ask`"
                yield Problem(line=rule.line, column=rule.column, message=text, fix=fix)
                break


def _pattern(resource: ResourceDecl, path: str) -> UrlPattern | None:
    try:
        found = compile_pattern("url", canonical_url(resource.base).rstrip("/") + path)
    except PatternError:
        return None
    return found if isinstance(found, UrlPattern) else None


def _covers(wide: UrlPattern | None, narrow: UrlPattern) -> bool:
    return wide is not None and wide.covers(narrow)


def _reaches(rule: Rule, resource: ResourceDecl, effect: EffectDecl) -> bool:
    """Whether a rule lets calls of a declared effect through, as far as one pattern lies within the other."""
    methods = [m for m in METHODS if m != "*"] if effect.method == "*" else [effect.method]
    if not any(applies(rule.action_pattern, f"http.{method.lower()}", forbids=False) for method in methods):
        return False
    here = _pattern(resource, effect.path)
    if here is None:
        return False
    return any(
        isinstance(one, AnyPattern) or one.covers(here) or (isinstance(one, UrlPattern) and here.covers(one))
        for one in rule.compiled()
    )
