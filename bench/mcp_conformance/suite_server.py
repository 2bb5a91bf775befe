"""The server that the suite wants to talk to, by the names of its tools: declared to the kernel, which passes them on."""

from __future__ import annotations

import base64
import json
import re
import sys
from typing import Any

import mcp_types as types
import suite_asks
from mcp.server.lowlevel.server import Server
from mcp.shared.exceptions import MCPError

# A red pixel, and the shortest sound there is.
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg=="
SOUND = base64.b64encode(
    b"RIFF\x26\x00\x00\x00WAVEfmt \x10\x00\x00\x00\x01\x00\x01\x00\x40\x1f\x00\x00\x40\x1f\x00\x00\x01\x00\x08\x00data\x02\x00\x00\x00\x80\x80"
).decode()
NOTHING: dict[str, Any] = {"type": "object", "properties": {}}
PERSON: dict[str, Any] = {
    "$schema": "https://json-schema.org/draft/2020-12/schema",
    "type": "object",
    "$defs": {
        "address": {
            "$anchor": "addressDef",
            "type": "object",
            "properties": {"street": {"type": "string"}, "city": {"type": "string"}},
        }
    },
    "properties": {
        "name": {"type": "string"},
        "address": {"$ref": "#/$defs/address"},
        "contactMethod": {"type": "string", "enum": ["phone", "email"]},
        "phone": {"type": "string"},
        "email": {"type": "string"},
    },
    "allOf": [{"anyOf": [{"required": ["phone"]}, {"required": ["email"]}]}],
    "if": {"properties": {"contactMethod": {"const": "phone"}}, "required": ["contactMethod"]},
    "then": {"required": ["phone"]},
    "else": {"required": ["email"]},
    "additionalProperties": False,
}
EMBEDDED = types.EmbeddedResource(
    resource=types.TextResourceContents(
        uri="test://embedded-resource", mime_type="text/plain", text="This is an embedded resource content."
    )
)
MIXED = types.EmbeddedResource(
    resource=types.TextResourceContents(
        uri="test://mixed-content-resource", mime_type="application/json", text='{"test":"data","value":123}'
    )
)
IMAGE = types.ImageContent(data=PIXEL, mime_type="image/png")
SENT_ALONG: dict[str, Any] = {
    "type": "object",
    "properties": {
        "region": {"type": "string", "x-mcp-header": "Region"},
        "query": {"type": "string"},
    },
}
SCHEMAS = {"json_schema_2020_12_tool": PERSON, "test_custom_headers": SENT_ALONG}
CONTENT: dict[str, list[Any]] = {
    "test_simple_text": [types.TextContent(text="This is a simple text response for testing.")],
    "test_image_content": [IMAGE],
    "test_audio_content": [types.AudioContent(data=SOUND, mime_type="audio/wav")],
    "test_embedded_resource": [EMBEDDED],
    "test_multiple_content_types": [types.TextContent(text="Multiple content types test:"), IMAGE, MIXED],
    "test_error_handling": [types.TextContent(text="This tool intentionally returns an error for testing")],
    "test_custom_headers": [types.TextContent(text="ok")],
    "test_logging_tool": [types.TextContent(text="ok")],
    "json_schema_2020_12_tool": [types.TextContent(text="ok")],
}


async def tools(_: Any, __: Any) -> types.ListToolsResult:
    listed = [
        types.Tool(name=name, description=name, input_schema=SCHEMAS.get(name, NOTHING))
        for name in (*CONTENT, *suite_asks.TOOLS)
    ]
    return types.ListToolsResult(tools=listed)


async def call(context: Any, params: types.CallToolRequestParams) -> Any:
    if params.name in suite_asks.TOOLS:
        return suite_asks.call(context, params)
    return types.CallToolResult(content=CONTENT[params.name], is_error=params.name == "test_error_handling")


TEMPLATE = "test://template/{id}/data"
RESOURCES: dict[str, Any] = {
    "test://static-text": types.TextResourceContents(
        uri="test://static-text",
        mime_type="text/plain",
        text="This is the content of the static text resource.",
    ),
    "test://static-binary": types.BlobResourceContents(
        uri="test://static-binary", mime_type="image/png", blob=PIXEL
    ),
}


async def resources(_: Any, __: Any) -> types.ListResourcesResult:
    listed = [
        types.Resource(uri=uri, name=uri, description=uri, mime_type=one.mime_type)
        for uri, one in RESOURCES.items()
    ]
    return types.ListResourcesResult(resources=listed)


async def templates(_: Any, __: Any) -> types.ListResourceTemplatesResult:
    one = types.ResourceTemplate(uri_template=TEMPLATE, name="data", mime_type="application/json")
    return types.ListResourceTemplatesResult(resource_templates=[one])


async def read(_: Any, params: types.ReadResourceRequestParams) -> types.ReadResourceResult:
    uri = str(params.uri)
    made = re.fullmatch("test://template/([^/]+)/data", uri)
    if made is not None:
        text = json.dumps({"id": made[1], "templateTest": True, "data": f"Data for ID: {made[1]}"})
        found: Any = types.TextResourceContents(uri=uri, mime_type="application/json", text=text)
        return types.ReadResourceResult(contents=[found])
    if uri not in RESOURCES:
        raise MCPError(types.INVALID_PARAMS, "Resource not found", data={"uri": uri})
    return types.ReadResourceResult(contents=[RESOURCES[uri]])


def said(*contents: Any) -> types.GetPromptResult:
    return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=one) for one in contents])


def wants(*names: str) -> list[types.PromptArgument]:
    return [types.PromptArgument(name=name, required=True) for name in names]


ASKING = "test_input_required_result_prompt"
PROMPTS = {
    ASKING: [],
    "test_simple_prompt": [],
    "test_prompt_with_arguments": wants("arg1", "arg2"),
    "test_prompt_with_embedded_resource": wants("resourceUri"),
    "test_prompt_with_image": [],
}


async def prompts(_: Any, __: Any) -> types.ListPromptsResult:
    listed = [
        types.Prompt(name=name, description=name, arguments=arguments) for name, arguments in PROMPTS.items()
    ]
    return types.ListPromptsResult(prompts=listed)


async def prompt(_: Any, params: types.GetPromptRequestParams) -> Any:
    if params.name == ASKING:
        return suite_asks.prompt(params)
    given = params.arguments or {}
    if params.name == "test_prompt_with_arguments":
        text = f"Prompt with arguments: arg1='{given['arg1']}', arg2='{given['arg2']}'"
        return said(types.TextContent(text=text))
    if params.name == "test_prompt_with_embedded_resource":
        inner = types.TextResourceContents(
            uri=given["resourceUri"], mime_type="text/plain", text="Embedded resource content for testing."
        )
        asked = types.TextContent(text="Please process the embedded resource above.")
        return said(types.EmbeddedResource(resource=inner), asked)
    if params.name == "test_prompt_with_image":
        return said(IMAGE, types.TextContent(text="Please analyze the image above."))
    return said(types.TextContent(text="This is a simple prompt for testing."))


async def complete(_: Any, params: types.CompleteRequestParams) -> types.CompleteResult:
    values = [one for one in ("testament", "testimony") if one.startswith(params.argument.value)]
    return types.CompleteResult(completion=types.Completion(values=values, total=len(values), has_more=False))


if __name__ == "__main__":
    import uvicorn

    suite = Server(
        "suite",
        on_list_tools=tools,
        on_call_tool=call,
        on_list_resources=resources,
        on_list_resource_templates=templates,
        on_read_resource=read,
        on_list_prompts=prompts,
        on_get_prompt=prompt,
        on_completion=complete,
    )
    app = suite.streamable_http_app()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
