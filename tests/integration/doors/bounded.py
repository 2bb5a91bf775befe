"""A prompt that is paged, one that can't be, and a reply that costs too much."""

import json
from typing import Any

import anthropic
import openai


def say(name: str, what: Any) -> None:
    print(json.dumps([name, what]))


def refused(call: Any) -> Any:
    try:
        call()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        return error
    raise AssertionError("it went through")


claude: Any = anthropic.Anthropic(max_retries=0).messages
chat: Any = openai.OpenAI(max_retries=0).chat.completions
HELLO = [{"role": "user", "content": "hello"}]
claude.create(model="claude-sonnet-5", messages=HELLO, max_tokens=10)
call: Any = {"type": "tool_use", "id": "c1", "name": "look", "input": {}}
result = {"type": "tool_result", "tool_use_id": "c1", "content": "a long result of a tool. " * 200}
history: list[Any] = [*HELLO, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
history += [{"role": "assistant", "content": "I see."}, *HELLO]
say("paged", claude.create(model="claude-sonnet-5", messages=history, max_tokens=10).content[0].text)
error = refused(lambda: chat.create(model="gpt-4o", messages=[{"role": "user", "content": "word " * 2000}]))
say("full", [error.status_code, error.code])
error = refused(lambda: chat.create(model="gpt-4o", messages=HELLO, max_tokens=4000))
headers = error.response.headers
say("spent", [error.status_code, error.code, int(headers["retry-after"]) > 0, headers["x-should-retry"]])
