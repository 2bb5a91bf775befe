"""The server that the suite wants to talk to, by the names of its tools: declared to the kernel, which passes them on."""

from __future__ import annotations

import base64
import sys
from typing import Any

import mcp_types as types
from mcp.server.lowlevel.server import Server

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
    "json_schema_2020_12_tool": [types.TextContent(text="ok")],
}


async def tools(_: Any, __: Any) -> types.ListToolsResult:
    listed = [
        types.Tool(name=name, description=name, input_schema=SCHEMAS.get(name, NOTHING)) for name in CONTENT
    ]
    return types.ListToolsResult(tools=listed)


async def call(_: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
    return types.CallToolResult(content=CONTENT[params.name], is_error=params.name == "test_error_handling")


if __name__ == "__main__":
    import uvicorn

    app = Server("suite", on_list_tools=tools, on_call_tool=call).streamable_http_app()
    uvicorn.run(app, host="127.0.0.1", port=int(sys.argv[1]), log_level="critical")
