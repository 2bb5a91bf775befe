"""An unmodified program: it finds endpoint and key in its environment, as everywhere."""

import json
from typing import Any

import anthropic

MODEL = "claude-sonnet-5"
HELLO: Any = [{"role": "user", "content": "hello"}]
IMAGE = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "aWNo"}}
SHOWN: Any = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, IMAGE]}]
TOOLS: Any = [{"name": "look", "input_schema": {"type": "object"}}]


def say(name: str, what: Any) -> None:
    print(json.dumps([name, what]))


def refused(call: Any) -> Any:
    try:
        call()
    except anthropic.APIStatusError as error:
        return error
    raise AssertionError("it went through")


client = anthropic.Anthropic(max_retries=0)
messages: Any = client.messages
beta = {"anthropic-beta": "some-beta"}

done = messages.create(model=MODEL, messages=HELLO, max_tokens=9000, system="be short", extra_headers=beta)
say("whole", [done.content[0].text, done.stop_reason, done.usage.output_tokens])
done = messages.create(model=MODEL, messages=SHOWN, max_tokens=50, tools=TOOLS)
say("tools", [[block.type for block in done.content], done.content[2].input, done.stop_reason])
with messages.stream(model=MODEL, messages=HELLO, max_tokens=50) as stream:
    text = "".join(stream.text_stream)
    last = stream.get_final_message()
say("stream", [text, last.stop_reason, [last.usage.input_tokens, last.usage.output_tokens]])
with messages.stream(model=MODEL, messages=HELLO, max_tokens=50, tools=TOOLS) as stream:
    last = stream.get_final_message()
kinds = [block.type for block in last.content]
say("stream tools", [kinds, last.content[2].input, last.content[0].signature, last.stop_reason])
say("models", [model.id for model in client.models.list()])
counts = [messages.count_tokens(model=MODEL, messages=HELLO, system="be short" * 9) for _ in range(2)]
say("count", [count.input_tokens for count in counts])
error = refused(lambda: messages.create(model=MODEL, messages=HELLO, max_tokens=50))
say("host's error", [error.status_code, error.body["error"]["type"]])
error = refused(
    lambda: messages.create(
        model="claude-listed-not",
        messages=HELLO,
        max_tokens=50,
        tools=[{"type": "web_search_20250305", "name": "web_search"}],
    )
)
say("hosted tool", [error.status_code, error.body["error"]["type"]])
error = refused(lambda: messages.create(model="other-1", messages=HELLO, max_tokens=50))
say("denied", [error.body["error"]["type"], error.body["error"]["ringfence"]["reason"]])
