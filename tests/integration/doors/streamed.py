"""Says when the first word of a reply came, and when all had."""

import json
from typing import Any

import anthropic
import openai

HELLO: Any = [{"role": "user", "content": "hello"}]
chat: Any = openai.OpenAI(max_retries=0).chat.completions
claude: Any = anthropic.Anthropic(max_retries=0).messages


def say(*what: str) -> None:
    print(json.dumps(what), flush=True)


def streamed() -> Any:
    for chunk in chat.create(model="gpt-4o", messages=HELLO, stream=True):
        for choice in chunk.choices:
            yield choice.delta.content or "", choice.finish_reason


text = ""
finish = ""
for word, ended in streamed():
    finish = ended or finish
    if word and not text:
        say("chat", "first")
    text += word
say("chat", f"all: {text}, {finish}")
text = ""
with claude.stream(model="claude-sonnet-5", messages=HELLO, max_tokens=50) as stream:
    for word in stream.text_stream:
        if not text:
            say("messages", "first")
        text += word
    say("messages", f"all: {text}, {stream.get_final_message().stop_reason}")
text = ""
try:
    for word, _ in streamed():
        text += word
except openai.APIError as error:
    say("cut", text, error.message[:9])
