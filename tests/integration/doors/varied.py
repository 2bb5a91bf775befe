"""Asks a model with a time, a place and a session that are others at each start, for each line that it reads from its mailbox."""

import http.client
import json
import os
import tempfile
import time
import uuid
from typing import Any
from urllib.parse import urlsplit

from ringfence import agent

SESSION = str(uuid.uuid4())


def ask(question: str) -> Any:
    place = tempfile.mkdtemp()
    prompt = f"It is {time.time_ns()}, work in {place}. {question}"
    body = {"model": "gpt-4o", "messages": [{"role": "user", "content": prompt}], "user": SESSION}
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(urlsplit(os.environ["OPENAI_BASE_URL"]).netloc)
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]


print(json.dumps(["first", ask("count")]), flush=True)
print(json.dumps(["second", ask("count")]), flush=True)
with agent.boot() as rf:
    word = rf.messages.receive().text
print(json.dumps([word, ask(word)]), flush=True)
