"""Knows nothing of Ringfence: it asks a model as it would anywhere."""

from typing import Any

import openai

client = openai.OpenAI()
messages: list[Any] = [{"role": "user", "content": "Name three rivers."}]
reply = client.chat.completions.create(model="small-1", messages=messages, max_tokens=100)
print(reply.choices[0].message.content)
messages += [
    reply.choices[0].message.model_dump(exclude_none=True),
    {"role": "user", "content": "And three lakes."},
]
with client.chat.completions.stream(model="small-1", messages=messages, max_tokens=100) as stream:
    print(stream.get_final_completion().choices[0].message.content)
