"""`llm.complete`: ask a language model of a declared host for a reply."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.policy.matcher import match_name
from ringfence.policy.tokenizers import tokenizer_of
from ringfence.policy.types import Verdict
from ringfence.syscalls import llm_assembly
from ringfence.syscalls.approving import Pointed
from ringfence.syscalls.base import Effect, Plan, Question, Window
from ringfence.syscalls.declared import LlmResource
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource, QuotaExceeded
from ringfence.syscalls.lent import ArtifactFound
from ringfence.syscalls.llm_assembly import Whole
from ringfence.syscalls.llm_client import Ask, Settled, ask
from ringfence.syscalls.llm_counting import counting
from ringfence.syscalls.llm_ledger import closeness_of
from ringfence.syscalls.llm_paging import Counted, Page, Paging, Request, apply, hash_of
from ringfence.syscalls.llm_parts import Part, take
from ringfence.syscalls.llm_wire import body_of, check
from ringfence.syscalls.payload import Room, exactly
from ringfence.syscalls.refusals import refuse_unavailable

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ringfence.syscalls.base import Call, Env

_TOKEN_BYTES = 64  # twice what a token has at most, but for rare ones
_AROUND = 64 << 10


class Arguments(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Model, messages and how the reply is to be."""

    model: str = ""
    messages: list[Any] = []
    max_tokens: int = 0
    temperature: float | None = None
    tools: list[Any] = []
    stream: bool = False
    resource: str = ""
    tool_choice: Any = None
    response_format: Any = None
    stop: list[str] = []
    top_p: float | None = None
    seed: int | None = None
    api: str = ""
    extra: Any = None
    headers: dict[str, str] = {}


class PagedResult(msgspec.Struct, frozen=True):
    """A result of a tool in place of which the model read a pointer."""

    name: str
    ref: str
    size_bytes: int
    message: int
    part: int


class Result(msgspec.Struct, frozen=True):
    """The reply, and what it was charged."""

    text: str
    message: Any
    finish_reason: str
    model: str
    resource: str
    prompt_tokens: int
    completion_tokens: int
    estimated: bool
    cost_usd: float
    paged: list[PagedResult]
    counted_tokens: int
    tokenizer: str
    reply: Any = None


def take_out(arguments: Arguments) -> tuple[Arguments, dict[str, Part]]:
    """The arguments with pointers in place of pictures, files and sound, and those by the names of their artifacts."""
    parts: dict[str, Part] = {}
    changed = msgspec.structs.replace(
        arguments, messages=take(arguments.messages, parts), extra=take(arguments.extra, parts)
    )
    return (changed, parts) if parts else (arguments, parts)


def aside(call: Call, arguments: Arguments) -> int:
    """Bytes of a request beyond its recorded arguments."""
    return llm_assembly.extent(call, arguments.messages, arguments.extra)


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the host. What the prompt takes is found by `measure`, for calls that are allowed.

    Raises:
        InvalidRequest: no model, no messages, a reply longer than the host's limit, or what the host would do by itself.
        NoSuchResource: no declared host serves the model, or the one that does is unavailable.
    """
    wire = check(arguments.api, arguments.extra, arguments.tools, arguments.headers, arguments.messages)
    resource = _host(arguments, env, wire.protocol)
    refuse_unavailable(resource)
    if not arguments.messages:
        raise InvalidRequest(
            '`messages` is empty; send at least one, such as {"role": "user", "content": "…"}'
        )
    for message in arguments.messages:
        if not isinstance(message, dict):
            raise InvalidRequest("each of `messages` has to be an object with `role` and `content`")
    most = arguments.max_tokens
    if arguments.api:
        # A program that nobody rewrites asks for what its own host gives: its replies end earlier here.
        most = min(most, resource.max_output)
    if not 0 <= most <= resource.max_output:
        raise InvalidRequest(
            f"`max_tokens` is {arguments.max_tokens}, `{resource.name}` gives at most {resource.max_output}; "
            "ask for less, or the operator raises `max_output`"
        )
    limit = most or resource.max_output
    wanted = Ask(
        resource=resource,
        model=arguments.model,
        body=b"",
        prompt_tokens=0,
        max_tokens=limit,
        stream=arguments.stream,
        wire=wire,
        headers=arguments.headers,
    )
    asked = Question(action="llm.complete", resource=arguments.model)
    return _plan(arguments, wanted, (asked, *llm_assembly.questions(arguments.messages, env)))


def _plan(arguments: Arguments, wanted: Ask, questions: tuple[Question, ...]) -> Plan:
    return Plan(
        resource=arguments.model,
        questions=questions,
        effect=Effect.EXTERNAL if wanted.resource.external else None,
        reserve=wanted.worst(),
        data=wanted,
    )


def room(call: Call, arguments: Arguments) -> Room:
    """The longest reply, whose text stands in the result twice."""
    del arguments
    return exactly(_AROUND + call.plan.data.max_tokens * _TOKEN_BYTES)


async def pointed(call: Call, arguments: Arguments) -> tuple[Pointed, ...]:
    """What the pointers of the request name now, for whoever is asked about it.

    Raises:
        NoSuchResource: one names nothing.
        InvalidRequest: together they are too long.
    """
    return await llm_assembly.pointed(call.env, arguments.messages)


async def measure(call: Call, arguments: Arguments, window: Window) -> Plan:
    """Count the prompt, page results of tools out of it where it is too long, and reserve the most that the call can take.

    A call that a kernel died over sends what it had paged out then: its progress says what that was.

    Raises:
        InvalidRequest: the messages can't be counted.
        CallFailed: they can't be counted now.
        QuotaExceeded: the prompt is too long, whatever leaves it; nothing was sent.
    """
    sources = await llm_assembly.found(call, arguments.messages)
    async with llm_assembly.whole(call, arguments.messages, arguments.extra, sources) as whole:
        asked = await _measured(call, arguments, whole, window)
        if whole.messages is not arguments.messages:
            # It is put together once more when its turn has come: a call may wait for long.
            asked = dataclasses.replace(asked, body=b"", sources=sources)
    made = _plan(arguments, asked, tuple(call.plan.questions))
    named = tuple(llm_assembly.told(pointer, one) for pointer, one in sources.items())
    return msgspec.structs.replace(made, pointed=named) if named else made


async def _measured(call: Call, arguments: Arguments, whole: Whole, window: Window) -> Ask:
    wanted: Ask = call.plan.data
    tokenizer = tokenizer_of(arguments.model, wanted.resource.tokenizers)
    closeness = closeness_of(wanted.resource.name, wanted.resource.base, arguments.model)
    request = Request(
        tokenizer=tokenizer,
        messages=whole.messages,
        tools=arguments.tools,
        tool_choice=arguments.tool_choice,
        # Instructions and all else that is sent besides.
        response_format=whole.extra if arguments.api else arguments.response_format,
        factor=closeness.factor,
        limit=window.max_tokens,
        page=window.page,
    )
    earlier = _earlier(call, whole.messages)
    if earlier is None:
        counted = await counting().count(request)
        _check(counted, window)
        pages = counted.pages
        await _readable(call, pages)
        messages, left = apply(whole.messages, pages)
    else:
        pages = earlier
        messages, left = apply(whole.messages, pages)
        counted = await counting().count(msgspec.structs.replace(request, messages=messages, limit=None))
    paging = (
        Paging(pages=list(pages), before=hash_of(whole.messages), after=hash_of(messages)) if pages else None
    )
    return dataclasses.replace(
        wanted,
        body=_body(arguments, messages, whole.extra, wanted),
        prompt_tokens=counted.tokens,
        raw_tokens=counted.raw,
        tokenizer=tokenizer,
        pages=tuple(pages),
        left=left,
        paging=paging,
    )


def _earlier(call: Call, messages: Sequence[Any]) -> list[Page] | None:
    """What a dead kernel had paged out for the same call; None: it had not come so far."""
    if call.progress is None:
        return None
    # Earlier releases recorded the pages alone.
    recorded = msgspec.json.decode(call.progress, type=list[Page] | Paging)
    pages = recorded.pages if isinstance(recorded, Paging) else recorded
    try:
        apply(messages, pages)
    except (ValueError, LookupError, TypeError):
        # An operator has put other arguments in place of the agent's.
        return None
    return pages


def _check(counted: Counted, window: Window) -> None:
    limit = window.max_tokens
    if limit is None or counted.tokens <= limit:
        return
    what = f"the prompt has {counted.whole} tokens and `budgets.context.max_tokens` is {limit}"
    if counted.pages:
        what += f"; with all {len(counted.pages)} earlier results of tools paged out it still has {counted.tokens}"
    elif window.page:
        what += "; no earlier result of a tool could be paged out of it"
    raise QuotaExceeded(
        f"{what}; nothing was sent: send fewer or shorter messages, or raise the limit in the manifest and submit it again",
        quota="context",
        limit=str(limit),
        used=str(counted.whole),
        paged=str(counted.tokens),
    )


async def _readable(call: Call, pages: Sequence[Page]) -> None:
    """Hold that the agent may read again what leaves its prompt.

    Raises:
        QuotaExceeded: it may not, so nothing is paged out.
    """
    if not pages:
        return
    (verdict,) = await call.judge((Question(action="artifacts.get", resource=pages[0].name),))
    if verdict is not Verdict.ALLOW:
        raise QuotaExceeded(
            "the prompt is longer than `budgets.context.max_tokens`, and nothing was paged out or sent: a rule keeps the agent "
            'from reading it again; allow `artifacts.get: "paged.*"`, also to who spawned it, or send fewer or shorter messages',
            quota="context",
        )


def _host(arguments: Arguments, env: Env, protocol: str) -> LlmResource:
    model = arguments.model
    if not model:
        raise InvalidRequest("`model` is missing; name one, such as `gpt-5`")
    spoken = {name: r for name, r in env.llm.items() if r.protocol == protocol}
    serving = {name: r for name, r in spoken.items() if any(match_name(p, model) for p in r.models)}
    if arguments.resource:
        if arguments.resource in serving:
            return serving[arguments.resource]
        known = ", ".join(sorted(serving)) or "none"
        raise NoSuchResource(f"`{arguments.resource}` is no declared host of `{model}`; declared: {known}")
    if not serving:
        known = ", ".join(f"{name} ({' '.join(r.models)})" for name, r in sorted(spoken.items())) or "none"
        kind = f"`type: llm`, `protocol: {protocol}`" if protocol != "openai" else "`type: llm`"
        raise NoSuchResource(
            f"no declared host serves the model `{model}`; declared: {known}; the operator can declare one of {kind}"
        )
    if len(serving) > 1:
        raise InvalidRequest(
            f"several hosts serve `{model}`: {', '.join(sorted(serving))}; name one with `resource`"
        )
    return next(iter(serving.values()))


def _body(arguments: Arguments, messages: Sequence[Any], extra: Any, wanted: Ask) -> bytes:
    wire = wanted.wire
    own: dict[str, Any] = {
        "model": arguments.model,
        wire.prompt: messages,
        # INVARIANT: the host is told the limit that was reserved, or a reply could cost more than that.
        wire.limit_key or wanted.resource.limit_key: wanted.max_tokens,
    }
    for name in ("temperature", "tools", "tool_choice", "response_format", "stop", "top_p", "seed"):
        value = getattr(arguments, name)
        if value is not None and value != []:
            own[name] = value
    # In the order that the agent wrote: a schema means something by it.
    return msgspec.json.encode(body_of(wire, extra, own, stream=arguments.stream))


async def run(call: Call, arguments: Arguments) -> Result:
    """Ask once, and again only where the host asks to wait; see `ask` for how it can fail."""
    wanted: Ask = call.plan.data
    if wanted.pages:
        await _page_out(call, wanted)
    settled = await _asked(call, arguments, wanted)
    reply = settled.reply
    passed = bool(arguments.api)
    return Result(
        text="" if passed else reply.text,
        message=None if passed else reply.message,
        finish_reason=reply.finish,
        model=reply.model or arguments.model,
        resource=call.plan.data.resource.name,
        prompt_tokens=settled.prompt,
        completion_tokens=settled.completion,
        estimated=settled.estimated,
        cost_usd=settled.usd,
        paged=[
            PagedResult(p.name, p.ref, p.size_bytes, message=p.message, part=p.part) for p in wanted.pages
        ],
        counted_tokens=wanted.prompt_tokens,
        tokenizer=wanted.tokenizer,
        reply=reply.document if passed else None,
    )


async def _asked(call: Call, arguments: Arguments, wanted: Ask) -> Settled:
    if wanted.body:
        return await ask(call, wanted)
    async with llm_assembly.whole(call, arguments.messages, arguments.extra, wanted.sources) as whole:
        messages, _ = apply(whole.messages, wanted.pages)
        return await ask(
            call, dataclasses.replace(wanted, body=_body(arguments, messages, whole.extra, wanted))
        )


async def _page_out(call: Call, wanted: Ask) -> None:
    """Keep what leaves the prompt.

    INVARIANT: it is durable, and the journal says what it is, before a prompt without it is sent.
    """
    for page in wanted.pages:
        artifact = ArtifactFound(
            name=page.name, version=0, ref=page.ref, media_type=page.media_type, size_bytes=page.size_bytes
        )
        await call.env.artifacts.keep_page(wanted.left[page.name], artifact, call.step)
        await call.failpoint("page_kept")
    if call.progress is None:
        await call.record(msgspec.json.encode(wanted.paging))
    await call.failpoint("paged_out")
