"""`llm.complete`: ask a language model of a declared host for a reply."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from ringfence.policy.matcher import match_name
from ringfence.syscalls.base import Effect, Plan, Question
from ringfence.syscalls.declared import LlmResource
from ringfence.syscalls.errors import InvalidRequest, NoSuchResource
from ringfence.syscalls.llm_client import Ask, ask
from ringfence.syscalls.llm_tokens import count_prompt
from ringfence.syscalls.refusals import refuse_unavailable

if TYPE_CHECKING:
    from ringfence.syscalls.base import Call, Env


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


def plan(arguments: Arguments, env: Env) -> Plan:
    """Find the host, count the prompt and reserve the most that the call can take.

    Raises:
        InvalidRequest: no model, no messages, or a reply longer than the host's limit.
        NoSuchResource: no declared host serves the model, or the one that does is unavailable.
    """
    resource = _host(arguments, env)
    refuse_unavailable(resource)
    if not arguments.messages:
        raise InvalidRequest(
            '`messages` is empty; send at least one, such as {"role": "user", "content": "…"}'
        )
    for message in arguments.messages:
        if not isinstance(message, dict):
            raise InvalidRequest("each of `messages` has to be an object with `role` and `content`")
    if not 0 <= arguments.max_tokens <= resource.max_output:
        raise InvalidRequest(
            f"`max_tokens` is {arguments.max_tokens}, `{resource.name}` gives at most {resource.max_output}; "
            "ask for less, or the operator raises `max_output`"
        )
    limit = arguments.max_tokens or resource.max_output
    prompt = count_prompt(
        arguments.messages, arguments.tools, arguments.tool_choice, arguments.response_format
    )
    wanted = Ask(
        resource=resource,
        body=_body(arguments, resource, limit),
        prompt_tokens=prompt,
        max_tokens=limit,
        stream=arguments.stream,
    )
    return Plan(
        resource=arguments.model,
        questions=(Question(action="llm.complete", resource=arguments.model),),
        effect=Effect.EXTERNAL if resource.external else None,
        reserve=wanted.worst(),
        context_tokens=prompt,
        data=wanted,
    )


def _host(arguments: Arguments, env: Env) -> LlmResource:
    model = arguments.model
    if not model:
        raise InvalidRequest("`model` is missing; name one, such as `gpt-5`")
    serving = {name: r for name, r in env.llm.items() if any(match_name(p, model) for p in r.models)}
    if arguments.resource:
        if arguments.resource in serving:
            return serving[arguments.resource]
        known = ", ".join(sorted(serving)) or "none"
        raise NoSuchResource(f"`{arguments.resource}` is no declared host of `{model}`; declared: {known}")
    if not serving:
        known = ", ".join(f"{name} ({' '.join(r.models)})" for name, r in sorted(env.llm.items())) or "none"
        raise NoSuchResource(
            f"no declared host serves the model `{model}`; declared: {known}; the operator can declare one of `type: llm`"
        )
    if len(serving) > 1:
        raise InvalidRequest(
            f"several hosts serve `{model}`: {', '.join(sorted(serving))}; name one with `resource`"
        )
    return next(iter(serving.values()))


def _body(arguments: Arguments, resource: LlmResource, limit: int) -> bytes:
    document: dict[str, Any] = {
        "model": arguments.model,
        "messages": arguments.messages,
        # INVARIANT: the host is told the limit that was reserved, or a reply could cost more than that.
        resource.limit_key: limit,
    }
    for name in ("temperature", "tools", "tool_choice", "response_format", "stop", "top_p", "seed"):
        value = getattr(arguments, name)
        if value is not None and value != []:
            document[name] = value
    if arguments.stream:
        document |= {"stream": True, "stream_options": {"include_usage": True}}
    # In the order that the agent wrote: a schema means something by it.
    return msgspec.json.encode(document)


async def run(call: Call, arguments: Arguments) -> Result:
    """Ask once, and again only where the host asks to wait; see `ask` for how it can fail."""
    settled = await ask(call)
    reply = settled.reply
    return Result(
        text=reply.text,
        message=reply.message,
        finish_reason=reply.finish,
        model=reply.model or arguments.model,
        resource=call.plan.data.resource.name,
        prompt_tokens=settled.prompt,
        completion_tokens=settled.completion,
        estimated=settled.estimated,
        cost_usd=settled.usd,
    )
