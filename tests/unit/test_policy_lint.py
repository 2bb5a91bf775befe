"""Warnings about files that are accepted: each is found where it is meant, and is silent where it is not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ringfence.policy.kernel_file import parse_kernel_file
from ringfence.policy.lint import lint_kernel_file, lint_manifest
from ringfence.policy.manifest import parse_manifest

HEAD = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: a}\nspec:\n  run: {command: [x]}\n"
KERNEL = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    crm: {type: postgres, dsn: {secret: x}, environment: staging}
    web: {type: http, base: "https://a.test"}
  ceilings: {deny: [{fs.*: "**/.env"}]}
  roles: {reader: {allow: [{fs.read: "/workspace/**"}]}}
"""


def warnings(spec: str, kernel: str = "") -> list[str]:
    file = parse_kernel_file(kernel) if kernel else None
    return [f"{w.line}: {w.message}" for w in lint_manifest(parse_manifest(HEAD + spec), file)]


def permissions(allow: str = "", ask: str = "", deny: str = "", more: str = "") -> str:
    listed = "".join(
        f"    {key}: [{text}]\n" for key, text in (("allow", allow), ("ask", ask), ("deny", deny))
    )
    return f"  permissions:\n{listed}{more}"


@pytest.mark.parametrize(
    ("allow", "ask", "deny", "what"),
    [
        # Needless.
        ('{fs.read: "/workspace/**"}, {fs.read: "/workspace/a"}', "", "", "says nothing that"),
        ('{fs.read: "/workspace/**"}, {fs.list: "/workspace/a/**"}', "", "", "says nothing that"),
        ('{fs.read: "/workspace/a"}, {fs.read: "/workspace/a"}', "", "", "says nothing that"),
        ('{fs.read: "/workspace/a"}', "", '{fs.*: "/workspace/b/**"}, {fs.write: "/workspace/b/c.txt"}', "says nothing"),
        ('{fs.write: "/workspace/a"}', '{fs.*: "/workspace/**"}', "", "is always asked"),
        # Too wide.
        ('{"*": "**"}', "", "", "allows every action on everything"),
        ('{exec.run: "*"}', "", "", "allows every command"),
        ('{exec.run: "python *"}', "", "", "`python` runs what its arguments say"),
        ('{exec.run: "sh -c *"}', "", "", "`sh` runs what its arguments say"),
        ('{exec.run: "/usr/bin/env *"}', "", "", "`env` runs what its arguments say"),
        ('{exec.run: "git *"}', "", "", "`git` runs what its arguments say"),
        ('{exec.run: "awk *"}', "", "", "`awk` runs what its arguments say"),
        ('{exec.run: "perl -e *"}', "", "", "`perl` runs what its arguments say"),
        ('{exec.run: "python3 -c *"}', "", "", "`python3` runs what its arguments say"),
        ('{exec.run: "find *"}', "", "", "`find` runs what its arguments say"),
        ('{exec.run: "find . -name *"}', "", "", "further words of `find` may be `-exec` and `-delete`"),
        ('{exec.run: "tar xf *"}', "", "", "further words of `tar` may be"),
        ('{exec.run: "sed s/a/b/ *"}', "", "", "further words of `sed` may be"),
        ('{exec.run: "timeout 5 *"}', "", "", "further words of `timeout` may be a program"),
        ('{exec.run: "py* x"}', "", "", "allows every program of that form"),
        ('{http.get: "**"}', "", "", "allows every URL"),
        ('{http.get: "https://*.com/**"}', "", "", "can be anybody's"),
        ('{http.get: "https://**/x"}', "", "", "can be anybody's"),
        ('{http.*: "https://a.test/**"}', "", "", "allows to write and delete everywhere"),
        ('{http.get: "http://a.test/x"}', "", "", "sends in the clear"),
        ("{sql.write: {database: crm}}", "", "", "allows to change every table"),
        ('{state.*: "**"}', "", "", "reaches the keys of every agent"),
        ('{messages.send: "*"}', "", "", "write to every agent"),
        # Weaker than they look.
        ('{http.get: "https://\u0430pple.com/x"}', "", "", "only look like ASCII ones"),
        ('{fs.read: "/workspace/**"}', "", '{fs.read: "/workspace/\u0440\u0430ss/**"}', "only look like ASCII ones"),
        ('{fs.read: "/workspace/**"}', "", '{fs.read: "/workspace/secret/*"}', "is one level"),
        ('{fs.read: "/workspace/**"}', "", '{fs.read: "/workspace/secret"}', "is that path alone"),
        ('{fs.*: "/workspace/**"}', "", '{fs.write: "/workspace/keep.txt"}', "leaves deleting to"),
        ('{exec.run: "bash *"}', "", '{exec.run: "rm *"}', "can do the same by another program"),
        ('{http.get: "https://a.test/**"}', "", '{http.get: "https://*.a.test/**"}', "neither the bare host nor deeper"),
        ('{http.*: "https://a.test/v1/**"}', "", '{http.post: "https://a.test/v1/pay"}', "leaves the same path in other capitals to"),
        ('{http.post: "https://a.test/**"}', '{http.*: "https://a.test/pay/*"}', "", "leaves the same path in other capitals to"),
    ],
)  # fmt: skip
def test_rules_that_are_not_what_they_look_like(allow: str, ask: str, deny: str, what: str) -> None:
    found = warnings(permissions(allow, ask, deny))
    assert any(what in text for text in found), found


@pytest.mark.parametrize(
    ("allow", "ask", "deny"),
    [
        ('{fs.read: "/workspace/a"}, {fs.write: "/workspace/a"}', "", '{fs.*: "/workspace/.env"}'),
        ('{fs.read: "/workspace/**"}', '{fs.delete: "/workspace/data/**"}', '{fs.*: "/workspace/secret/**"}'),
        ('{exec.run: "git status"}, {exec.run: "git log *"}, {exec.run: "pytest *"}', "", '{exec.run: "git push *"}'),
        ('{exec.run: "python tool.py *"}', "", ""),
        ('{http.get: "https://*.example.com/v1/*"}, {http.get: "http://127.0.0.1:8080/**"}', "", ""),
        ("{sql.write: {database: crm, tables: [a]}}, {sql.read: {database: crm}}", "", ""),
        ('{state.*: "jobs/**"}, {messages.send: "clerk-*"}, {memory.*: "**"}', "", ""),
        ('{fs.read: "/workspace/**"}', '{fs.delete: "/workspace/uploads/*"}', ""),
        ('{fs.*: "/workspace/**"}', "", '{fs.write: "/workspace/a.txt"}, {fs.delete: "/workspace/a.txt"}'),
    ],
)  # fmt: skip
def test_what_is_meant_is_left_alone(allow: str, ask: str, deny: str) -> None:
    assert warnings(permissions(allow, ask, deny)) == []


@pytest.mark.parametrize(
    ("allow", "when", "what"),
    [
        ('{http.get: "https://a.test/x"}', "{action: sql.write, if: tainted, then: ask}", "never matters"),
        ('{http.post: "https://a.test/x"}', "{action: http.post, if: {budget: {total: usd, over: 50%}}, then: ask}", "no limit"),
        (
            '{http.post: "https://a.test/x"}',
            '{action: http.post, require: {fresh: 1h, of: [{fs.read: "/workspace/a"}]}}',
            "nothing allows to read",
        ),
        (
            '{http.post: "https://a.test/x"}, {http.put: "https://a.test/x"}',
            "{action: http.post, if: tainted, then: ask}",
            "may still send with `http.put`",
        ),
        (
            '{fs.read: "/workspace/**"}, {exec.run: "cat *"}',
            "{action: fs.read, resource: secret/**, if: tainted, then: deny}",
            "hides nothing from the commands",
        ),
    ],
)  # fmt: skip
def test_conditions_that_do_not_what_they_look_like(allow: str, when: str, what: str) -> None:
    found = warnings(permissions(allow) + f"  when: [{when}]\n")
    assert any(what in text for text in found), found


POST = '{http.*: "https://a.test/x"}, {fs.write: "/workspace/a"}, {sql.write: {database: crm}}, {messages.send: "a"}, {exec.run: "a"}'


@pytest.mark.parametrize(
    ("action", "test", "what"),
    [
        ("http.post", "hearsay: /to", "no call of `http.post` has an argument `/to`, so the condition can never hold"),
        ("http.post", "hearsay: [/json/to, /jsn/cc]", "has an argument `/jsn`, so the condition can never hold"),
        ("http.get", "hearsay: /json/to", "no call of `http.get` sends a body, so the condition always matches"),
        ("http.*", "hearsay: /json/to", "calls of `http.get`, `http.head` send no body, so there the condition always matches"),
        ("http.post", "hearsay: /url/to", "`/url` has no parts, and `/url/to` names one, so the condition can never hold"),
        ("http.post", "hearsay: /body", "`/body` is bytes, as base64, so the condition always matches"),
        ("fs.write", "hearsay: /json/to", "no call of `fs.write` sends a body, so the condition always matches"),
        ("fs.write", "hearsay: /parameters/0", "can never hold"),
        ("http.post", "amount: {field: /amount, over: 1}", "has an argument `/amount`, so the condition always matches"),
        ("http.post", "amount: {field: /URL, over: 1}", "has an argument `/URL`, so the condition always matches"),
        ("http.post", "amount: {field: /url, over: 1}", "`/url` is no number, so the condition always matches"),
        ("sql.*", "created: false", "who made it isn't known for `sql.read`, so there the condition always matches"),
        ("http.get", "amount: {field: /json/amount, over: 1}", "sends a body, so the condition always matches"),
    ],
)  # fmt: skip
def test_places_that_no_call_has(action: str, test: str, what: str) -> None:
    found = warnings(permissions(POST) + f"  when: [{{action: {action}, if: {{{test}}}, then: ask}}]\n")
    assert any(what in text and text.startswith("10:") for text in found), found


@pytest.mark.parametrize(
    ("action", "test"),
    [
        ("http.post", "hearsay: [/json/to, /JSON/Cc, /headers/x-to, /url]"),
        ("http.*", "hearsay: /url"),
        ("http.delete", "hearsay: /json"),
        ("sql.write", "hearsay: /parameters/0"),
        ("sql.write", "amount: {field: /parameters/1, over: 5}"),
        ("messages.send", "hearsay: [/to, /json/to]"),
        ("exec.run", "hearsay: /argv"),
        ("sql.write", "created: false"),
        ("fs.write", "created: false"),
        ("http.post", "amount: {field: /json/amount, over: 5}"),
    ],
)
def test_places_that_calls_have(action: str, test: str) -> None:
    found = warnings(permissions(POST) + f"  when: [{{action: {action}, if: {{{test}}}, then: ask}}]\n")
    assert not any(text.startswith("10:") for text in found), found


def test_a_manifest_under_its_kernel_file() -> None:
    spec = permissions(
        '{fs.read: "/workspace/.env"}, {sql.read: {database: shop}}, {sql.read: {database: crm}}, {http.get: "https://a.test/x"}'
    )
    when = "  when: [{action: sql.read, if: {environment: prod}, then: ask}, {action: http.get, if: tainted, then: ask}]\n"
    found = "\n".join(warnings(spec + when, KERNEL))
    for what in (
        "can never have a say",
        "no database `shop`",
        "has the environment `prod`",
        "no resource is `untrusted`",
    ):
        assert what in found
    assert "`crm`" not in found
    known = KERNEL.replace(
        "resources:",
        """resources:
    mail: {type: http, base: "https://a.test", vouches: {"GET /sent": {of: /*, fields: /to, as: written-to}}}""",
    )
    for name, warned in (("written-to", False), ("answers", False), ("writen-to", True)):
        test = f"hearsay: {{fields: /url, vouched_by: [input, {name}]}}"
        when = f"  when: [{{action: http.get, if: {{{test}}}, then: ask}}]\n"
        found = "\n".join(warnings(permissions('{http.get: "https://a.test/x"}') + when, known))
        assert ("vouches for anything as `writen-to`" in found) is warned, name
    assert "declares no role `gone`" in "\n".join(warnings("  permissions: {roles: [gone]}\n", KERNEL))
    assert warnings("  permissions: {roles: [reader]}\n", KERNEL) == []


FINAL = """apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    cloud:
      type: http
      base: "https://cloud.test/v1"
      effects: {"DELETE /volumes/*": destroy, "POST /volumes/*/wipe": destroy, "DELETE /notes/*": destroy}
      undo: {"DELETE /notes/**": {keep: "GET {path}", put_back: "PUT {path}"}}
  roles:
    ops: {allow: [{http.delete: "https://cloud.test/v1/volumes/7"}]}
"""


@pytest.mark.parametrize(
    ("rule", "what"),
    [
        ('http.delete: "https://cloud.test/v1/**"', "`DELETE /volumes/*` of `cloud`"),
        ('http.*: "https://cloud.test/v1/volumes/9/wipe"', "`POST /volumes/*/wipe` of `cloud`"),
        ('http.delete: "https://cloud.test/v1/notes/*"', ""),
        ('http.put: "https://cloud.test/v1/volumes/*"', ""),
        ('http.delete: "https://cloud.test/v2/volumes/*"', ""),
    ],
)
def test_what_destroys_and_has_no_way_back(rule: str, what: str) -> None:
    found = [one for one in warnings(permissions(allow=rule), FINAL) if "can't be undone" in one]
    assert len(found) == bool(what)
    assert what in "".join(found)
    assert any("can't be undone" in w.message and w.line for w in lint_kernel_file(parse_kernel_file(FINAL)))


def test_a_kernel_file() -> None:
    text = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    web: {type: http, base: "http://a.test", auth: {bearer: {secret: x}}}
    near: {type: http, base: "http://127.0.0.1:80", auth: {bearer: {secret: x}}}
  ceilings:
    deny: [{fs.*: "/workspace/secret/**"}]
    when: [{action: http.*, if: {environment: prod}, then: deny}]
  roles: {a: {allow: [{fs.read: "/workspace/secret/a"}, {exec.run: "bash *"}]}}
  untaint: [{exec.run: "clean"}]
"""
    found = "\n".join(f"{w.line}: {w.message}" for w in lint_kernel_file(parse_kernel_file(text)))
    for what in (
        "`web` is sent over `http://`",
        "can never have a say",
        "`bash` runs what",
        "has the environment `prod`",
        "nothing is ever tainted",
    ):
        assert what in found
    assert "near" not in found


def test_what_is_ignored_of_calls_that_change_something() -> None:
    ignored = """  restart:
    ignore:
      - {pattern: "session [0-9]+"}
      - {action: fs.write, at: /data}
      - {action: http.get, at: /headers}
      - {action: state.put, pattern: "[0-9]+"}
      - {action: mcp.tracker.create, at: /arguments/id}
      - {action: mcp.tracker.@resource, pattern: "[0-9]+"}
      - {action: mcp.tracker.*, pattern: "[0-9]+"}
"""
    found = [
        one for one in warnings(permissions('{llm.complete: "*"}') + ignored) if "gets its answer" in one
    ]
    named = [(line := one.partition(":"))[0] + line[2].split("`")[1] for one in found]
    first = (HEAD + permissions('{llm.complete: "*"}')).count("\n") + 4
    assert named == [
        *(f"{first}fs.write", f"{first + 2}state.put", f"{first + 3}mcp.tracker.create"),
        f"{first + 5}mcp.tracker.*",
    ]


def test_the_examples_of_the_reference_deserve_no_warning() -> None:
    text = (Path(__file__).parents[2] / "docs" / "manifest.md").read_text(encoding="utf-8")
    whole = [block for block in re.findall(r"```yaml\n(.*?)```", text, re.DOTALL) if "\nkind: " in block]
    manifest, kernel_file = whole
    assert lint_manifest(parse_manifest(manifest)) == []
    assert [w.message for w in lint_kernel_file(parse_kernel_file(kernel_file))] == []
