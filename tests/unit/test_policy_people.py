"""How many people have to approve, who is told outside and who may answer: read as strictly as everything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from ringfence.policy.kernel_file import ManifestError, parse_kernel_file
from ringfence.policy.lint import lint_kernel_file
from ringfence.policy.manifest import parse_manifest
from ringfence.policy.outreach import EVENTS

AGENT = "apiVersion: ringfence/v1\nkind: Agent\nmetadata: {name: a}\nspec:\n  run: {command: [x]}\n"
KERNEL = "apiVersion: ringfence/v1\nkind: Kernel\nspec:\n"
KEY = "{secret: k}"


def approvals(text: str):
    return parse_manifest(f"{AGENT}  approvals: {text}\n").approvals


def test_a_manifest_says_how_many_and_for_what() -> None:
    assert parse_manifest(AGENT).approvals.people.number == 1
    found = approvals('{expire: 1h, people: 2, for: [{http.post: "https://a.test/pay/**"}, {exec.run: "*"}]}')
    assert (found.expire_s, found.people.number) == (3600.0, 2)
    assert found.people.concerns("http.post", "https://a.test/pay/1")
    assert found.people.concerns("exec.run", ("rm", "-r", "x"))
    assert not found.people.concerns("http.post", "https://a.test/other")
    assert not found.people.concerns("fs.write", "/workspace/a")
    assert approvals("{people: 3}").people.concerns("ask", "May I?")


def test_what_can_not_be_read_needs_more_people() -> None:
    found = approvals('{people: 2, for: [{http.post: "https://a.test/pay/**"}, {exec.run: "rm *"}]}').people
    assert found.concerns("http.post", "no url at all")
    assert found.concerns("exec.run", ("sh", "-c", "$x"))


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("{people: 0}", "from 1 to 8"),
        ("{people: 9}", "from 1 to 8"),
        ("{people: two}", "from 1 to 8"),
        ("{for: [llm.*]}", "says no number"),
        ("{people: 2, for: []}", "is empty"),
        ("{people: 2, for: [nonsense.run]}", "nonsense"),
        ("{not_submitter: maybe}", "true"),
        ("{persons: 2}", "unknown key"),
    ],
)
def test_what_is_wrong_in_a_manifest_is_said(text: str, wanted: str) -> None:
    with pytest.raises(ManifestError, match=wanted):
        approvals(text)


def test_the_kernel_file_names_who_is_told_and_who_answers() -> None:
    found = parse_kernel_file(
        KERNEL
        + "  ceilings: {approvals: {people: 2, not_submitter: true}}\n"
        + '  webhooks: {chat: {url: "https://Chat.example.com/in", key: {secret: k}, events: [approval.asked]}, all: {url: "http://10.1.2.3/x", key: {secret: k}}}\n'
        + '  callback: {listen: "[::1]:8766", people: {anna: {key: {secret: a}, account: root}, bert: {key: {secret: b}}}}\n'
    )
    assert (found.ceilings.people.number, found.ceilings.people.not_submitter) == (2, True)
    chat = found.webhooks["chat"]
    assert (chat.url, chat.key.secret, chat.events) == (
        "https://chat.example.com/in",
        "k",
        ("approval.asked",),
    )
    assert found.webhooks["all"].events == EVENTS
    assert found.callback is not None
    assert (found.callback.host, found.callback.port) == ("::1", 8766)
    assert [found.callback.person_of(who) for who in ("root", "anna", "bert", "carl")] == [
        "anna",
        "anna",
        "bert",
        "carl",
    ]


AT = 'listen: "127.0.0.1:80"'
HOOK = f'url: "https://a.test/x", key: {KEY}'


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        (f"webhooks: {{a: {{key: {KEY}}}}}", "has no `url`"),
        ('webhooks: {a: {url: "https://a.test/x"}}', "has no `key`"),
        ('webhooks: {a: {url: "https://a.test/x", key: hunter2}}', "has to name a secret"),
        (f'webhooks: {{a: {{url: "https://a.test/x?token=1", key: {KEY}}}}}', "has a query"),
        (f'webhooks: {{a: {{url: "ftp://a.test/x", key: {KEY}}}}}', "`spec.webhooks.a.url`"),
        (f"webhooks: {{a: {{{HOOK}, events: [agent.sneezed]}}}}", "write one of"),
        (f"webhooks: {{a: {{{HOOK}, events: []}}}}", "is empty"),
        ('callback: {listen: "127.0.0.1:8766"}', "has no `people`"),
        (f"callback: {{people: {{a: {{key: {KEY}}}}}}}", "has no `listen`"),
        (f'callback: {{listen: "localhost:8766", people: {{a: {{key: {KEY}}}}}}}', "is no address"),
        (f'callback: {{listen: "127.0.0.1:0", people: {{a: {{key: {KEY}}}}}}}', "is no address"),
        (f'callback: {{listen: "999.0.0.1:80", people: {{a: {{key: {KEY}}}}}}}', "is no address"),
        ('callback: {listen: "127.0.0.1:80", people: {a: {}}}', "has no `key`"),
        (
            f'callback: {{listen: "127.0.0.1:80", people: {{"a/b": {{key: {KEY}}}}}}}',
            "is no name of a person",
        ),
        (
            f'callback: {{listen: "127.0.0.1:80", people: {{a: {{key: {KEY}}}, b: {{key: {KEY}}}}}}}',
            "two people have the key `k`",
        ),
        (
            'callback: {listen: "127.0.0.1:80", people: {a: {key: {secret: x}, account: r}, b: {key: {secret: y}, account: r}}}',
            "two people have the account `r`",
        ),
        (
            'callback: {listen: "127.0.0.1:80", people: {a: {key: {secret: x}, account: b}, b: {key: {secret: y}}}}',
            "`b` is a person and the account of `a`",
        ),
        ("ceilings: {approvals: {people: 2, expire: 1h}}", "unknown key `expire`"),
        (f"callback: {{hooks: {{ci: {{key: {KEY}, agents: [a]}}}}}}", "has no `listen`"),
        (f"callback: {{{AT}, hooks: {{ci: {{agents: [a]}}}}}}", "has no `key`"),
        (f"callback: {{{AT}, hooks: {{ci: {{key: {KEY}}}}}}}", "would reach every agent"),
        (f"callback: {{{AT}, hooks: {{ci: {{key: {KEY}, agents: []}}}}}}", "is empty"),
        (f"callback: {{{AT}, hooks: {{ci: {{key: {KEY}, labels: {{}}}}}}}}", "is empty"),
        (
            f"callback: {{{AT}, hooks: {{ci: {{key: {KEY}, agents: ['a[1]']}}}}}}",
            "has no meaning in a pattern",
        ),
        (f"callback: {{{AT}, hooks: {{ci: {{key: {KEY}, agents: [a], rate: often}}}}}}", "write a rate"),
        (f"callback: {{{AT}, hooks: {{'a b': {{key: {KEY}, agents: [a]}}}}}}", "is no name"),
        (
            f"callback: {{{AT}, people: {{a: {{key: {KEY}}}}}, hooks: {{ci: {{key: {KEY}, agents: [a]}}}}}}",
            "the hook `ci` has the key `k` of somebody else",
        ),
    ],
)
def test_what_is_wrong_in_a_kernel_file_is_said(text: str, wanted: str) -> None:
    with pytest.raises(ManifestError, match=wanted) as caught:
        parse_kernel_file(f"{KERNEL}  {text}\n")
    assert "hunter2" not in str(caught.value)


def test_a_hook_reaches_agents_by_name_and_by_all_of_its_labels() -> None:
    text = "{key: {secret: k}, agents: [build, 'ci-*'], labels: {team: billing, tier: 1}, rate: 5/m}"
    found = parse_kernel_file(f"{KERNEL}  callback: {{{AT}, hooks: {{ci: {text}}}}}\n").callback
    assert found is not None
    hook = found.hooks["ci"]
    labels = {"team": "billing", "tier": "1", "more": "x"}
    assert [hook.reaches(name, labels) for name in ("build", "ci-1", "ci-", "builds", "c")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert not hook.reaches("build", {"team": "billing"})
    assert not hook.reaches("build", {**labels, "team": "sales"})
    assert hook.rate.text == "5/m"


def test_the_examples_of_the_page_are_read() -> None:
    page = Path(__file__).parents[2] / "docs" / "approvals.md"
    blocks = re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    ceilings, webhooks, callback = (
        parse_kernel_file(f"apiVersion: ringfence/v1\nkind: Kernel\n{text}") for text in blocks
    )
    assert (ceilings.ceilings.people.number, len(ceilings.ceilings.people.of)) == (2, 2)
    assert sorted(webhooks.webhooks) == ["chat", "pager"]
    assert callback.callback is not None
    assert sorted(callback.callback.people) == ["anna", "bert"]


@pytest.mark.parametrize(
    ("callback", "told"),
    [
        ("", True),
        ("{anna: {key: {secret: a}, account: root}}", True),
        ("{anna: {key: {secret: a}}}", False),
        ("{anna: {key: {secret: a}, account: root}, bert: {key: {secret: b}}}", False),
    ],
)
def test_more_people_than_there_can_be_are_warned_of(callback: str, told: bool) -> None:
    text = f"{KERNEL}  ceilings:\n    approvals: {{people: 2}}\n"
    if callback:
        text += f'  callback: {{listen: "127.0.0.1:80", people: {callback}}}\n'
    found = lint_kernel_file(parse_kernel_file(text))
    assert [(one.line, "2 people have to approve" in one.message) for one in found] == (
        [(5, True)] if told else []
    )


def test_messages_of_hooks_taint_so_that_a_condition_on_it_can_hold() -> None:
    rules = "  ceilings: {when: [{action: http.*, if: tainted, then: deny}]}\n  untaint: [{exec.run: 'sanitise *'}]\n"
    hook = f"  callback: {{{AT}, hooks: {{ci: {{key: {KEY}, agents: [a]}}}}}}\n"
    told = [problem.message for problem in lint_kernel_file(parse_kernel_file(KERNEL + rules))]
    assert len([text for text in told if "no resource is `untrusted`" in text]) == 2
    heard = [problem.message for problem in lint_kernel_file(parse_kernel_file(KERNEL + rules + hook))]
    assert not any("no resource is `untrusted`" in text for text in heard)
