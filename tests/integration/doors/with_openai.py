"""An unmodified program: it finds endpoint and key in its environment, as everywhere."""

import json
from typing import Any

import openai

HELLO: Any = [{"role": "user", "content": "hello"}]
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
FLAT: Any = [{"type": "function", "name": "look", "parameters": {"type": "object"}, "strict": False}]


def say(name: str, what: Any) -> None:
    print(json.dumps([name, what]))


def refused(call: Any) -> openai.APIStatusError:
    try:
        call()
    except openai.APIStatusError as error:
        return error
    raise AssertionError("it went through")


client = openai.OpenAI(max_retries=0)
chat, responses = client.chat.completions, client.responses

done = chat.create(model="gpt-4o", messages=HELLO, max_tokens=50, temperature=0.5)
assert done.usage
say("whole", [done.choices[0].message.content, done.choices[0].finish_reason, done.usage.completion_tokens])
done = chat.create(model="gpt-4o", messages=HELLO, tools=TOOLS)
calls: Any = done.choices[0].message.tool_calls
say("tools", [[[c.function.name, c.function.arguments] for c in calls], done.choices[0].finish_reason])

with chat.stream(model="gpt-4o", messages=HELLO, stream_options={"include_usage": True}) as stream:
    final = stream.get_final_completion()
assert final.usage
usage = [final.usage.prompt_tokens, final.usage.completion_tokens]
say("stream", [final.choices[0].message.content, final.choices[0].finish_reason, usage])
name = arguments = finish = ""
usages = 0
for chunk in chat.create(model="gpt-4o", messages=HELLO, tools=TOOLS, stream=True):
    usages += chunk.usage is not None
    for choice in chunk.choices:
        finish = choice.finish_reason or finish
        for call in choice.delta.tool_calls or ():
            assert call.function
            name += call.function.name or ""
            arguments += call.function.arguments or ""
say("stream tools", [[name, arguments], finish, usages])

answer = responses.create(model="gpt-4o", input="hello", instructions="be short")
assert answer.usage
say("response", [answer.output_text, answer.status, answer.usage.total_tokens])
with responses.stream(model="gpt-4o", input="hello", tools=FLAT) as streamed:
    last = streamed.get_final_response()
item: Any = last.output[1]
say("response stream", [last.output_text, [item.name, item.arguments], last.status])

say("models", [model.id for model in client.models.list()])
error: Any = refused(lambda: chat.create(model="own", messages=HELLO))
say("denied", [{**error.body["ringfence"], "code": error.code}, error.message])
error = refused(lambda: chat.create(model="gpt-4o", messages=HELLO))
say("host's error", [error.status_code, error.body])
say("cut", refused(lambda: chat.create(model="gpt-4o", messages=HELLO)).status_code)
searching: Any = [{"type": "web_search"}]
error = refused(lambda: responses.create(model="gpt-4o", input="hello", tools=searching))
say("hosted tool", [error.status_code, "where no rule holds" in error.message])
error = refused(lambda: chat.create(model="gpt-4o", messages=HELLO, n=2))
say("two replies", [error.status_code, "one reply" in error.message])
