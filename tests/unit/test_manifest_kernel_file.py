"""The operator's file: resources, ceilings and roles, as strict as the manifest; secrets stay references."""

from __future__ import annotations

import pytest
from ringfence.policy.engine import AgentPolicy
from ringfence.policy.engines import DockerSpec, RemoteSpec
from ringfence.policy.kernel_file import ManifestError, SecretRef, parse_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.resources import Auth, EffectDecl
from ringfence.policy.types import Request, Verdict
from ringfence.policy.units import Rate

CONTRACT = """\
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    crm:     {type: postgres, dsn: {secret: crm-dsn}, environment: staging}
    rates:   {type: http, base: "https://api.example.com/v1", auth: {bearer: {secret: rates-token}}, untrusted: true}
    payments: {type: http, base: "http://127.0.0.1:9000", effects: {"POST /pay": external, "DELETE /**": destroy}}
    model:   {type: llm, base: "http://127.0.0.1:8080/v1", protocol: openai, models: ["*"], price: {input: 1.25, output: 10}}
  ceilings:                        # no agent gets more, whatever its manifest says
    deny: [{fs.*: "**/.env"}]
    budgets: {rate: {http.*: 50/s}}
  roles: {clerk: {allow: [{sql.read: {database: crm}}]}}
  sandbox: {backend: native}
"""

IMAGE = f"sha256:{'0a' * 32}"
HEAD = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n"


def test_the_file_of_the_contract_is_read_in_full() -> None:
    found = parse_kernel_file(CONTRACT)
    crm, rates, payments, model = (found.resources[name] for name in ("crm", "rates", "payments", "model"))
    assert (crm.type, crm.dsn, crm.environment, crm.secrets()) == (
        "postgres",
        SecretRef(secret="crm-dsn"),
        "staging",
        ("crm-dsn",),
    )
    assert rates.base == "https://api.example.com/v1"
    assert rates.auth == Auth(scheme="bearer", value=SecretRef(secret="rates-token"))
    assert rates.untrusted
    assert not payments.untrusted
    assert payments.effects == (
        EffectDecl(method="POST", path="/pay", effect="external"),
        EffectDecl(method="DELETE", path="/**", effect="destroy"),
    )
    assert payments.idempotency_header == ""
    assert (model.protocol, model.models, model.price_input, model.price_output) == (
        "openai",
        ("*",),
        1.25,
        10.0,
    )
    assert [rule.text for rule in found.ceilings.rules] == ['fs.*: "**/.env"']
    assert found.ceilings.budgets.rate == {"http.*": Rate(count=50, per_s=1.0)}
    assert [rule.id for rule in found.roles["clerk"]] == ["clerk.1"]
    assert found.sandbox.backend == "native"
    assert found.unsupported() == []


def test_the_engine_and_its_image_are_read() -> None:
    text = f"  sandbox: {{backend: docker, docker: {{image: 'base@{IMAGE}', runtime: runsc, host: 'unix:///x/y.sock'}}}}\n"
    found = parse_kernel_file(HEAD + text)
    assert found.sandbox.backend == "docker"
    assert found.docker == DockerSpec(image=f"base@{IMAGE}", runtime="runsc", host="unix:///x/y.sock")
    assert found.unsupported() == []
    assert parse_kernel_file(HEAD + "  sandbox: {}\n").docker == DockerSpec()


def test_the_sandbox_host_is_read() -> None:
    section = "  sandbox: {backend: remote, remote: {address: 'big-machine:7443', certs: /etc/k}}\n"
    found = parse_kernel_file(HEAD + section)
    assert found.sandbox.backend == "remote"
    assert found.remote == RemoteSpec(address="big-machine:7443", certs="/etc/k")
    assert found.unsupported() == []
    assert parse_kernel_file(HEAD + "  sandbox: {}\n").remote == RemoteSpec()
    assert parse_kernel_file(HEAD + section.replace("big-machine", "[::1]")).remote.address == "[::1]:7443"


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ("{address: 'a:1'}", "has no `certs`"),
        ("{certs: /c}", "has no `address`"),
        ("{address: a, certs: /c}", "`a` is no address"),
        ("{address: 'a:70000', certs: /c}", "`a:70000` is no address"),
        ("{address: 'https://a:1', certs: /c}", "is no address"),
        ("{address: 'a:1', certs: c}", "`c` is no absolute path"),
        ("{address: 'a:1', certs: /c, name: x}", "unknown key `name`"),
        ("a:1", "mapping"),
    ],
)
def test_a_sandbox_host_that_makes_no_sense(section: str, what: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_kernel_file(f"{HEAD}  sandbox: {{remote: {section}}}\n")
    assert what in str(caught.value)


def test_a_manifest_names_the_backend_and_nothing_of_the_engine() -> None:
    agent = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: a}\nspec:\n  run: {command: [a]}\n"
    manifest = parse_manifest(f"{agent}  sandbox: {{backend: docker}}\n")
    assert (manifest.sandbox.backend, manifest.unsupported()) == ("docker", [])
    with pytest.raises(ManifestError, match="unknown key `docker`"):
        parse_manifest(f"{agent}  sandbox: {{docker: {{image: '{IMAGE}'}}}}\n")


def test_an_empty_spec_declares_nothing() -> None:
    found = parse_kernel_file("apiVersion: ringfence/v1\nkind: Kernel\nspec: {}\n")
    assert (found.resources, found.roles, found.ceilings.rules) == ({}, {}, ())


def test_other_forms_of_resources() -> None:
    found = parse_kernel_file(
        HEAD
        + """\
  resources:
    literal: {type: postgres, dsn: "postgresql://app@db.example/app", untrusted: true}
    words: {type: postgres, dsn: "host=/run/pg dbname=app"}
    inventory: {type: postgres, embedded: true}
    shop:
      type: http
      base: "HTTPS://Shop.Example.com:443/api/"
      auth: {header: {name: X-Api-Key, value: {secret: shop-key}}}
      idempotency_header: Idempotency-Key
      timeout: 5s
      effects: {"* /admin/**": destroy, "GET /**": read}
    basic: {type: http, base: "http://h", auth: {basic: {username: bot, password: {secret: pw}}}}
    local: {type: llm, base: "http://h", models: [gpt-*, meta/llama-3]}
"""
    )
    assert found.resources["literal"].dsn == "postgresql://app@db.example/app"
    assert found.resources["words"].dsn == "host=/run/pg dbname=app"
    assert found.resources["inventory"].embedded
    shop = found.resources["shop"]
    assert shop.base == "https://shop.example.com/api"
    assert shop.auth == Auth(scheme="header", value=SecretRef(secret="shop-key"), header="X-Api-Key")
    assert (shop.idempotency_header, shop.timeout_s) == ("Idempotency-Key", 5.0)
    assert [(item.method, item.path, item.effect) for item in shop.effects] == [
        ("*", "/admin/**", "destroy"),
        ("GET", "/**", "read"),
    ]
    assert found.resources["basic"].auth == Auth(scheme="basic", value=SecretRef(secret="pw"), username="bot")
    assert found.resources["local"].models == ("gpt-*", "meta/llama-3")


CASES = [
    ("  resource: {}\n", (4, 3), "unknown key `resource`"),
    ("  resources: []\n", (4, 14), "`spec.resources` is a list"),
    ("  resources: {Crm: {type: postgres, dsn: a=b}}\n", (4, 15), "`Crm` is no resource name"),
    ("  resources: {crm: {type: postgres, dsn: a=b}, crm: {}}\n", (4, 48), "the key `crm` is there twice"),
    ("  resources: {crm: text}\n", (4, 20), "no mapping"),
    ("  resources: {crm: {dsn: a=b}}\n", (4, 20), "has no `type`"),
    ("  resources: {crm: {type: mysql}}\n", (4, 27), "`crm.type` is `mysql`"),
    ("  resources: {crm: {type: postgres}}\n", (4, 20), "has no `dsn`"),
    ("  resources: {crm: {type: postgres, dsn: nonsense}}\n", (4, 42), "no connection string"),
    ("  resources: {crm: {type: postgres, dsn: a=b, base: x}}\n", (4, 47), "unknown key `base`"),
    ("  resources: {crm: {type: postgres, dsn: {secrets: x}}}\n", (4, 43), "unknown key `secrets`"),
    ("  resources: {crm: {type: postgres, dsn: {secret: a/b}}}\n", (4, 51), "`a/b` is no name"),
    ("  resources: {crm: {type: postgres, dsn: a=b, untrusted: 1}}\n", (4, 58), "`crm.untrusted` is `1`"),
    ("  resources: {h: {type: http}}\n", (4, 18), "has no `base`"),
    ('  resources: {h: {type: http, base: "ftp://h"}}\n', (4, 37), "http://"),
    ('  resources: {h: {type: http, base: "http://h/a?b"}}\n', (4, 37), "a query or a fragment"),
    ('  resources: {h: {type: http, base: "http://u:p@h"}}\n', (4, 37), "credentials"),
    (
        "  resources: {h: {type: http, base: http://h, auth: {bearer: hunter2}}}\n",
        (4, 62),
        "has to name a secret",
    ),
    ("  resources: {h: {type: http, base: http://h, auth: {}}}\n", (4, 53), "exactly one of"),
    (
        "  resources: {h: {type: http, base: http://h, auth: {basic: {username: a}}}}\n",
        (4, 61),
        "has no `password`",
    ),
    (
        "  resources: {h: {type: http, base: http://h, auth: {header: {name: Host, value: {secret: a}}}}}\n",
        (4, 69),
        "`Host` is no header",
    ),
    (
        "  resources: {h: {type: http, base: http://h, effects: {POST: read}}}\n",
        (4, 57),
        "no method and path",
    ),
    (
        "  resources: {h: {type: http, base: http://h, effects: {post /a: read}}}\n",
        (4, 57),
        "no method and path",
    ),
    (
        "  resources: {h: {type: http, base: http://h, effects: {POST /a/: read}}}\n",
        (4, 57),
        "ends in a slash",
    ),
    ("  resources: {h: {type: http, base: http://h, effects: {POST /a?b: read}}}\n", (4, 57), "query"),
    ("  resources: {h: {type: http, base: http://h, effects: {POST /a: maybe}}}\n", (4, 66), "is `maybe`"),
    (
        "  resources: {h: {type: http, base: http://h, idempotency_header: a b}}\n",
        (4, 67),
        "`a b` is no header",
    ),
    (
        "  resources: {m: {type: llm, base: http://h, models: []}}\n",
        (4, 54),
        "is empty, so it serves nothing",
    ),
    ("  resources: {m: {type: llm, base: http://h, models: ['a?']}}\n", (4, 55), "`?` has no meaning"),
    (
        "  resources: {m: {type: llm, base: http://h, price: {input: -1}}}\n",
        (4, 61),
        "`m.price.input` is `-1`",
    ),
    ("  resources: {m: {type: llm, base: http://h, protocol: grpc}}\n", (4, 56), "`m.protocol` is `grpc`"),
    ("  ceilings: {allow: []}\n", (4, 14), "unknown key `allow`"),
    ("  ceilings: {deny: [{fs.fly: x}]}\n", (4, 22), "unknown action `fs.fly`"),
    ("  ceilings: {budgets: {rate: {http.*: 1}}}\n", (4, 39), "`spec.ceilings.budgets.rate.http.*` is `1`"),
    ("  roles: {a b: {}}\n", (4, 11), "`a b` is no name"),
    ("  roles: {a: {allow: [{fs.read: x}], deny: [{fs.*: '**'}]}}\n", (4, 24), "can never match"),
    ("  sandbox: {backend: jail}\n", (4, 22), "`spec.sandbox.backend` is `jail`"),
    ("  sandbox: {docker: {}}\n", (4, 21), "`spec.sandbox.docker` has no `image`"),
    ("  sandbox: {docker: here}\n", (4, 21), "`spec.sandbox.docker` is"),
    ("  sandbox: {docker: {image: debian}}\n", (4, 29), "`debian` names no digest"),
    ("  sandbox: {docker: {image: 'debian:12'}}\n", (4, 29), "`debian:12` names no digest"),
    (f"  sandbox: {{docker: {{image: 'sha256:{'A' * 64}'}}}}\n", (4, 29), "names no digest"),
    (f"  sandbox: {{docker: {{image: '{IMAGE}', runtime: crun}}}}\n", (4, 113), "`crun`"),
    (
        f"  sandbox: {{docker: {{image: '{IMAGE}', host: 'tcp://h:1'}}}}\n",
        (4, 110),
        "`tcp://h:1` is no socket",
    ),
    (f"  sandbox: {{docker: {{image: '{IMAGE}', tag: x}}}}\n", (4, 104), "unknown key `tag`"),
]


@pytest.mark.parametrize(("tail", "place", "said"), CASES)
def test_one_problem_has_its_place_and_remedy(tail: str, place: tuple[int, int], said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_kernel_file(HEAD + tail, "ringfence.yaml")
    found = caught.value.problems
    assert [(item.line, item.column) for item in found] == [place], str(caught.value)
    assert said in found[0].message
    assert found[0].fix
    assert str(caught.value).startswith(f"ringfence.yaml:{place[0]}:{place[1]}: ")


@pytest.mark.parametrize(
    "tail",
    [
        "  resources: {h: {type: http, base: http://h, auth: {bearer: hunter2}}}\n",
        "  resources: {h: {type: http, base: http://h, auth: {basic: {username: a, password: hunter2}}}}\n",
        "  resources: {h: {type: http, base: 'http://a:hunter2@h'}}\n",
        "  resources: {crm: {type: postgres, dsn: hunter2}}\n",
    ],
)
def test_a_problem_never_repeats_what_may_be_a_secret(tail: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_kernel_file(HEAD + tail)
    assert "hunter2" not in str(caught.value)


def test_ceilings_beat_every_grant() -> None:
    ceilings = parse_kernel_file(CONTRACT).ceilings.rules
    grants = [(rule.id, rule) for rule in parse_kernel_file(CONTRACT).roles["clerk"]]
    policy = AgentPolicy("bot", grants, [], ceilings)
    for action, resource, verdict in (
        ("fs.read", "/workspace/.env", Verdict.DENY),
        ("sql.read", "crm/invoices", Verdict.ALLOW),
    ):
        assert policy.decide(Request(principal="bot", action=action, resource=resource)).verdict is verdict
    assert policy.masks(["/workspace/a/.env", "/workspace/a"]) == ["/workspace/a/.env"]


def test_a_kernel_file_is_no_manifest() -> None:
    with pytest.raises(ManifestError, match="`kind` is `Agent`"):
        parse_kernel_file(CONTRACT.replace("Kernel", "Agent"))
