"""Asks three times the same; is killed after the second, and waits for a word before the third."""

import http.client
import json
import os
from urllib.parse import urlsplit

from ringfence import agent


def ask() -> str:
    body = json.dumps({"model": "gpt-4o", "messages": [{"role": "user", "content": "count"}]}).encode()
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    connection = http.client.HTTPConnection(urlsplit(os.environ["OPENAI_BASE_URL"]).netloc)
    connection.request("POST", "/v1/chat/completions", body, headers)
    return json.load(connection.getresponse())["choices"][0]["message"]["content"]


print(json.dumps(ask()))
print(json.dumps(ask()))
with agent.boot() as rf:
    rf.messages.receive()
print(json.dumps(ask()))
