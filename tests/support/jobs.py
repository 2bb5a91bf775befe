"""What the agents of the kill matrix do: one job for each row and recovery class, some of them under a rule that asks."""

from __future__ import annotations

PROGRAM = """
import json, sys
from ringfence import agent

job = json.load(sys.stdin)
def work():
    name = job["name"].removesuffix("-asked")
    if name == "append":
        rf.fs.append_text("counted.txt", "x")
    elif name == "write":
        rf.fs.write_text("written.txt", "new")
    elif name == "move":
        rf.fs.move("from.txt", "to.txt")
    elif name == "delete":
        rf.fs.delete("tree", recursive=True)
    elif name == "exec":
        rf.exec.run(["sh", "-c", "printf x >> counted.txt; rm doomed.txt"])
    elif name == "insert":
        rf.sql.execute("target", "insert into counted (agent) values (%s)", [job["id"]])
    elif name == "remove":
        rf.sql.execute("target", "delete from stock where agent = %s", [job["id"]])
    elif name == "state":
        with rf.state.transaction() as tx:
            tx.put(job["id"], (tx.get(job["id"]) or 0) + 1)
    elif name == "put":
        rf.state.put(job["id"], 1)
    elif name == "keyed":
        rf.http.post(job["base"] + "/keyed/" + job["id"], json={"pay": 1})
    elif name == "unknown":
        rf.http.post(job["plain"] + "/plain/" + job["id"], json={"pay": 1})
    elif name == "get":
        rf.http.get(job["base"] + "/get/" + job["id"])
    elif name == "select":
        rf.sql.query("target", "select count(*) as n from stock")
    elif name == "read":
        rf.fs.read_text("read.txt")
    elif name == "send":
        rf.messages.send(job["peer"], job["id"])
    elif name == "receive":
        rf.artifacts.put("received", rf.messages.receive().text)
    elif name == "memory":
        rf.memory.append("counted", space=job["id"])
    elif name == "artifact":
        rf.artifacts.put("counted", job["id"])
    elif name == "spawn":
        rf.spawn("child-of-" + job["id"][:40], ["true"], workspace="read.txt")
    elif name == "model":
        said = rf.llm.complete(model="m", messages=[{"role": "user", "content": "count"}], max_tokens=100, stream=True)
        rf.fs.append_text("said.txt", said.text)
    elif name == "take":
        rf.claim(job["id"], 600)
    elif name in ("renew", "release"):
        claim = rf.claim(job["id"], 600)
        claim.renew(3600) if name == "renew" else claim.release()
    elif name == "timer":
        rf.sleep(0.5)
        rf.fs.append_text("counted.txt", "x")

with agent.boot() as rf:
    rf.now()
    if rf.checkpoint.restored is None:
        work()
        rf.checkpoint.save({"done": True})
"""

MANIFEST = """
apiVersion: ringfence/v1
kind: Agent
metadata: {{name: {name}}}
spec:
  run: {{command: [python, agent.py]}}
  permissions:
    allow:
      - fs.*: "/workspace/**"
      - exec.run: "*"
      - state.*: "**"
      - http.*: "{base}/**"
      - http.*: "{plain}/**"
      - sql.*: {{database: target}}
      - messages.*: "*"
      - memory.*: "**"
      - artifacts.*: "*"
      - claim.*: "**"
      - spawn: "*"
      - llm.complete: m
  restart: {{policy: on-failure, max: 5}}
"""

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    keyed: {{type: http, base: "{base}", idempotency_header: Idempotency-Key}}
    plain: {{type: http, base: "{plain}"}}
    target: {{type: postgres, dsn: "{target}"}}
    model: {{type: llm, base: "{model}", price: {{input: 1000, output: 1000}}}}
"""

ACTIONS = {
    "append": "fs.append",
    "write": "fs.write",
    "move": "fs.move",
    "delete": "fs.delete",
    "exec": "exec.run",
    "insert": "sql.write",
    "remove": "sql.write",
    "state": "state.transaction",
    "put": "state.put",
    "keyed": "http.post",
    "unknown": "http.post",
    "get": "http.get",
    "select": "sql.read",
    "read": "fs.read",
    "send": "messages.send",
    "receive": "messages.receive",
    "memory": "memory.append",
    "artifact": "artifacts.put",
    "take": "claim.take",
    "renew": "claim.renew",
    "release": "claim.release",
    "timer": "sleep",
    "spawn": "spawn",
    "model": "llm.complete",
    # The same under a rule that asks: a person approves each, and the kill comes after that.
    "delete-asked": "fs.delete",
    "exec-asked": "exec.run",
    "insert-asked": "sql.write",
    "put-asked": "state.put",
    "keyed-asked": "http.post",
    "unknown-asked": "http.post",
}
FIRST = {"renew", "release"}
"""They come to their point through a call that others are to stand at."""
ASKED = {
    "delete-asked": 'fs.delete: "/workspace/tree/**"',
    "exec-asked": 'fs.*: "/workspace/doomed.txt"',
    "insert-asked": "sql.write: {database: target}",
    "put-asked": 'state.put: "**"',
    "keyed-asked": 'http.post: "**"',
    "unknown-asked": 'http.post: "**"',
}

WORKSPACE = {
    "agent.py": PROGRAM,
    "counted.txt": "",
    "doomed.txt": "doomed",
    "from.txt": "moved",
    "read.txt": "read",
    "written.txt": "old",
    "tree/a": "a",
    "tree/deep/b": "b",
    "tree/empty": None,
}

# What each row passes through; a row without intent has no such commit, a mere read no effect to count.
POINTS = (
    "before_intent",
    "after_intent",
    "before_effect",
    "after_effect",
    "before_apply",
    "after_apply",
    "before_outcome",
    "after_outcome",
    # Where the files of a child are made.
    "before_files",
    "after_files",
    # Where a part of a streamed reply has come.
    "mid_stream",
)
ATOMIC = {"state", "put", "send", "receive", "memory", "artifact", "take", "renew", "release", "spawn"}
NO_INTENT = {"read"}
READS = {"get", "select"}


ARTIFACTS = (
    "select f.name, f.version, f.ref from artifacts f join agents a on a.key = f.agent where a.id = %s"
)


def kind_of(name: str) -> str:
    """The job without the person who is asked."""
    return name.removesuffix("-asked")


def passes(name: str, point: str) -> bool:
    """Whether the row of this job reaches a failpoint."""
    name = kind_of(name)
    if point in ("before_apply", "after_apply"):
        return name == "exec"
    if point in ("before_files", "after_files"):
        return name == "spawn"
    if point == "mid_stream":
        return name == "model"
    if name in ATOMIC:
        return point in ("before_intent", "after_outcome")
    if name in NO_INTENT:
        return point in ("before_outcome", "after_outcome")
    if name == "exec":
        return point not in ("before_effect", "after_effect")
    if name in ("select", "timer"):
        return point not in ("before_effect", "after_effect")
    return True
