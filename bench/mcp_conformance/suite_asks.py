"""Tools and a prompt of the suite's server that ask for something before they answer."""

from __future__ import annotations

import hashlib
import hmac
import json
from typing import Any

import mcp_types as types
from mcp.shared.exceptions import MCPError

KEY = b"the suite's own"
MISSING_CAPABILITY = -32021


def form(message: str, **properties: Any) -> types.ElicitRequest:
    schema = {"type": "object", "properties": properties, "required": list(properties)}
    return types.ElicitRequest(params=types.ElicitRequestFormParams(message=message, requested_schema=schema))


def sample(text: str, most: int = 100) -> types.CreateMessageRequest:
    message = types.SamplingMessage(role="user", content=types.TextContent(text=text))
    return types.CreateMessageRequest(
        params=types.CreateMessageRequestParams(messages=[message], max_tokens=most)
    )


def sealed(text: str) -> str:
    return f"{text}.{hmac.new(KEY, text.encode(), hashlib.sha256).hexdigest()}"


def opened(state: str | None) -> str:
    """What was sealed.

    Raises:
        MCPError: it was not.
    """
    text = (state or "").rpartition(".")[0]
    if not hmac.compare_digest(sealed(text), state or ""):
        raise MCPError(types.INVALID_PARAMS, "the state was tampered with")
    return text


TEXT = {"type": "string"}
NAME = form("What is your name?", name=TEXT)
ROOTS = types.ListRootsRequest(params=types.RequestParams())
OPTIONS = ["option1", "option2", "option3"]
TITLED = [{"const": f"value{n}", "title": f"Option {n}"} for n in (1, 2, 3)]
ENUMS = form(
    "Choose",
    untitledSingle={"type": "string", "enum": OPTIONS},
    titledSingle={"type": "string", "oneOf": TITLED},
    legacyEnum={"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["One", "Two", "Three"]},
    untitledMulti={"type": "array", "items": {"type": "string", "enum": OPTIONS}},
    titledMulti={"type": "array", "items": {"anyOf": TITLED}},
)
DEFAULTS = form(
    "Who are you?",
    name={"type": "string", "default": "John Doe"},
    age={"type": "integer", "default": 30},
    score={"type": "number", "default": 95.5},
    status={"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    verified={"type": "boolean", "default": True},
)
OK = form("Please confirm", ok={"type": "boolean"})
# By the name of the tool: what it asks for at once, and whether a state goes along.
ONCE: dict[str, tuple[dict[str, Any], str]] = {
    "test_input_required_result_elicitation": ({"user_name": NAME}, ""),
    "test_input_required_result_sampling": (
        {"capital_question": sample("What is the capital of France?")},
        "",
    ),
    "test_input_required_result_list_roots": ({"client_roots": ROOTS}, ""),
    "test_input_required_result_request_state": ({"confirm": OK}, "state-ok"),
    "test_input_required_result_tampered_state": ({"confirm": OK}, "round-1"),
    "test_input_required_result_multiple_inputs": (
        {"user_name": NAME, "greeting": sample("Generate a greeting", 50), "client_roots": ROOTS},
        "all",
    ),
    "test_streaming_elicitation": ({"user_name": NAME}, ""),
    "test_elicitation": (
        {"user": form("Please provide your information", username=TEXT, email=TEXT)},
        "",
    ),
    "test_elicitation_sep1034_defaults": ({"user": DEFAULTS}, ""),
    "test_elicitation_sep1330_enums": ({"user": ENUMS}, ""),
    "test_sampling": ({"answer": sample("Test prompt for sampling")}, ""),
}
TOOLS = (
    *ONCE,
    "test_input_required_result_multi_round",
    "test_input_required_result_capabilities",
    "test_missing_capability",
)


def asking(requests: dict[str, Any], state: str = "") -> types.InputRequiredResult:
    return types.InputRequiredResult(input_requests=requests, request_state=sealed(state) if state else None)


def told(text: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=text)])


def call(context: Any, params: types.CallToolRequestParams) -> Any:
    given = params.input_responses or {}
    said = json.dumps({name: one.model_dump(by_alias=True, mode="json") for name, one in given.items()})
    if params.name in ONCE:
        requests, state = ONCE[params.name]
        if state and given:
            opened(params.request_state)
        return told(f"{state} {said}") if requests.keys() <= given.keys() else asking(requests, state)
    if params.name == "test_input_required_result_multi_round":
        if not given:
            return asking({"step1": form("Step 1: What is your name?", name=TEXT)}, "round-1")
        if opened(params.request_state) == "round-1":
            return asking({"step2": form("Step 2: What is your favorite color?", color=TEXT)}, "round-2")
        return told(said)
    able = context.session.client_capabilities
    if params.name == "test_missing_capability":
        if able is None or able.sampling is None:
            raise MCPError(
                MISSING_CAPABILITY, "sampling is needed", data={"requiredCapabilities": {"sampling": {}}}
            )
        return told("it is there")
    known = {"elicitation": NAME, "sampling": sample("Say something"), "roots": ROOTS}
    return asking({name: one for name, one in known.items() if getattr(able, name, None) is not None})


def prompt(params: types.GetPromptRequestParams) -> Any:
    given = params.input_responses or {}
    if "user_context" not in given:
        return asking({"user_context": form("What context should the prompt use?", context=TEXT)})
    text = json.dumps(given["user_context"].model_dump(by_alias=True, mode="json"))
    message = types.PromptMessage(role="user", content=types.TextContent(text=text))
    return types.GetPromptResult(messages=[message])
