"""`rf.llm`: language models of declared hosts, for threads and for asyncio. Credentials are added by the kernel."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ringfence.agent import values, wire
from ringfence.agent.operations import Json, Operation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from ringfence.agent.aio_calls import AsyncCaller
    from ringfence.agent.calls import Caller


def complete(
    model: str, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> Operation[values.Completion]:
    """Ask for a reply; options that are None are left to the kernel and the host."""
    arguments: Json = {"model": model, "messages": [dict(message) for message in messages]}
    arguments |= {name: value for name, value in options.items() if value is not None}
    wire.check_plain("the arguments of `llm.complete`", arguments)
    return Operation("llm.complete", arguments, _completion)


def _completion(result: Json) -> values.Completion:
    message: dict[str, Any] = result.get("message") or {}
    return values.Completion(
        text=result.get("text", ""),
        message=message,
        tool_calls=tuple(message.get("tool_calls") or ()),
        finish_reason=result.get("finish_reason", ""),
        model=result.get("model", ""),
        resource=result.get("resource", ""),
        prompt_tokens=int(result.get("prompt_tokens", 0)),
        completion_tokens=int(result.get("completion_tokens", 0)),
        estimated=bool(result.get("estimated", False)),
        cost_usd=float(result.get("cost_usd", 0.0)),
        paged=tuple(_paged(page) for page in result.get("paged") or ()),
        counted_tokens=int(result.get("counted_tokens", 0)),
        tokenizer=result.get("tokenizer", ""),
    )


def _paged(page: Json) -> values.Paged:
    return values.Paged(
        name=page.get("name", ""),
        ref=page.get("ref", ""),
        size_bytes=int(page.get("size_bytes", 0)),
        message=int(page.get("message", 0)),
        part=int(page.get("part", 0)),
    )


class Models:
    """Language models."""

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def complete(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        temperature: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
        stop: Sequence[str] | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stream: bool = False,
        resource: str | None = None,
    ) -> values.Completion:
        """Ask a model for a reply. Its tokens are reserved before and settled by what the host says it used.

        Args:
            model: name of the model.
            messages: such as `[{"role": "user", "content": "…"}]`. They stay as they are, also where `paged` of the reply
                says that the model read pointers in place of some of them.
            max_tokens: most tokens of the reply; None: the host's limit.
            temperature: of the sampling.
            tools: that the model may call.
            tool_choice: which tool has to be called.
            response_format: form of the reply.
            stop: texts that end the reply.
            top_p: of the sampling.
            seed: of the sampling.
            stream: have the host send the reply in parts, so that `ReplyCut` has what came of a cut one.
            resource: the declared host; None: the one that serves the model.

        Raises:
            BudgetExhausted: the most that it can take is more than is left.
            QuotaExceeded: the prompt is too long, or the host asks its callers to wait.
            ReplyCut: the reply ended too early; what came is in `metadata["partial"]`.
        """
        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "tools": list(tools) if tools is not None else None,
            "tool_choice": tool_choice,
            "response_format": response_format,
            "stop": list(stop) if stop is not None else None,
            "top_p": top_p,
            "seed": seed,
            "stream": stream or None,
            "resource": resource,
        }
        return self._caller.run(complete(model, messages, options))


class AsyncModels:
    """Language models."""

    def __init__(self, caller: AsyncCaller) -> None:
        self._caller = caller

    async def complete(
        self,
        *,
        model: str,
        messages: Sequence[Mapping[str, Any]],
        max_tokens: int | None = None,
        temperature: float | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: Any = None,
        response_format: Any = None,
        stop: Sequence[str] | None = None,
        top_p: float | None = None,
        seed: int | None = None,
        stream: bool = False,
        resource: str | None = None,
    ) -> values.Completion:
        """Ask a model for a reply; see `Models.complete`."""
        options = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "tools": list(tools) if tools is not None else None,
            "tool_choice": tool_choice,
            "response_format": response_format,
            "stop": list(stop) if stop is not None else None,
            "top_p": top_p,
            "seed": seed,
            "stream": stream or None,
            "resource": resource,
        }
        return await self._caller.run(complete(model, messages, options))
