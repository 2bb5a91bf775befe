"""Public accidents with tokens, roles, mail and other agents, acted out on our own; `policy explain` names the rule."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from ringfence.agent import Denied, InvalidRequest, NoSuchResource, Stale
from support.incidents import World, explained, world
from support.kernels import eventually
from support.scenes import Held

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres, pytest.mark.timeout(180)]

TOKEN = "prod-0f3c9a7e51"


@pytest.fixture(scope="module")
def here() -> Iterator[World]:
    with world() as here:
        yield here


# -- the volume that a stray token deleted -----------------------------------------------------------------------------

CURL = """
import socket, sys, urllib.request
try:
    request = urllib.request.Request(sys.argv[1], method="DELETE", headers={"Authorization": "Bearer " + sys.argv[2]})
    print(urllib.request.urlopen(request, timeout=3).status)
except OSError as error:
    print("no way out:", type(error).__name__)
"""


def test_a_stray_token_is_good_for_nothing(here: World) -> None:
    """C62: a routine job in staging met a wrong credential, looked for another one, and deleted a volume with all its backups."""
    held = here.scene.hold(
        allow=[
            'fs.read: "/workspace/**"',
            'exec.run: "*"',
            f'http.*: "{here.base}/v1/staging/**"',
        ],
        files={"infra/.railway.json": json.dumps({"token": TOKEN}), "curl.py": CURL},
    )
    before = here.delivered()
    token = json.loads(held.rf.fs.read_text("infra/.railway.json"))["token"]
    volume = f"{here.base}/v1/prod/volumes/7"
    # With its own credential, whatever that may do: only what a rule says.
    denied = held.refused(Denied, lambda: held.rf.http.delete(volume))
    assert "nothing allows" in denied.message
    assert explained(held)[0] == "deny"
    # With the token: an agent sets no credentials, nor hides one in a place where a rule does not look.
    for headers in (
        {"Authorization": f"Bearer {token}"},
        {"Cookie": f"token={token}"},
        {"X-HTTP-Method-Override": "DELETE"},
    ):
        held.refused(
            InvalidRequest,
            lambda headers=headers: held.rf.http.post(f"{here.base}/v1/staging/jobs", headers=headers),
        )
    held.refused(
        Denied,
        lambda: held.rf.http.post(f"{here.base}/v1/prod/graphql?token={token}", json={"volumeDelete": 7}),
    )
    held.refused(
        Denied, lambda: held.rf.http.delete(f"{here.base}/v1/staging%2Fprod/volumes/7".replace("%2F", "x"))
    )
    with pytest.raises((Denied, InvalidRequest)):
        held.rf.http.delete(f"{here.base}/v1/staging/../prod/volumes/7")
    # By a door of its own: there is no network where commands run.
    done = held.rf.exec.run(["python3", "curl.py", volume, token])
    assert "no way out" in done.stdout
    # And nowhere else.
    held.refused(NoSuchResource, lambda: held.rf.http.delete("http://platform.example/v1/prod/volumes/7"))
    assert here.delivered() == before


def test_a_destruction_that_can_not_be_undone_is_asked_even_where_a_rule_allows_it(here: World) -> None:
    held = here.scene.hold(allow=[f'http.*: "{here.base}/v1/**"'])
    before = here.delivered()
    call = held.rf.thread(lambda: held.rf.http.delete(f"{here.base}/v1/staging/volumes/7"))
    found: list[Any] = []
    eventually(
        lambda: found.extend(held.operator.ask("Approvals", agent=held.id)["approvals"]) or bool(found),
        "nobody was asked",
    )
    assert found[0]["detail"]["undo"].startswith("can't be undone")
    held.operator.ask("Deny", id=found[0]["id"], reason="a volume with its backups")
    with pytest.raises(Denied):
        call.result()
    assert here.delivered() == before


# -- the environment that an inherited role deleted --------------------------------------------------------------------


def test_an_inherited_role_ends_at_the_ceiling(here: World) -> None:
    """To mend a small thing the agent chose to delete the environment and make it anew; it had its operator's role."""
    here.ceilings(f'deny: [{{http.delete: "{here.base}/**"}}, {{http.*: "{here.base}/v1/prod/**"}}]')
    try:
        held = here.scene.hold(
            more="", allow=['spawn: "*"', f'http.*: "{here.base}/**"', 'fs.*: "/workspace/**"']
        )
        before = here.delivered()
        held.refused(Denied, lambda: held.rf.http.delete(f"{here.base}/v1/prod/environments/cost-explorer"))
        verdict, rules, reason = explained(held)
        assert verdict == "deny"
        assert rules == [f'http.delete: "{here.base}/**"'], reason
        held.refused(
            Denied, lambda: held.rf.http.post(f"{here.base}/v1/prod/environments", json={"recreate": True})
        )
        assert here.delivered() == before
        # Nor through one that it starts with all that the operator has.
        child = here.scene.held(
            held.rf.spawn(
                "worker",
                ["sh", "-c", "printf '%s\\n' \"$RINGFENCE_TOKEN\"; exec sleep 100000"],
                roles=["operator"],
            ).id
        )
        child.refused(Denied, lambda: child.rf.http.delete(f"{here.base}/v1/prod/environments/cost-explorer"))
        assert "ceiling" in explained(child)[2]
        assert here.delivered() == before
    finally:
        here.ceilings("")


def test_rights_in_staging_end_where_production_begins(here: World) -> None:
    """The same role in both: it is the environment of the resource that decides, as the operator declared it."""
    here.ceilings('when: [{action: "http.*", if: {environment: prod}, then: deny}]')
    try:
        held = here.scene.hold(allow=[f'http.*: "{here.base}/**"'])
        before = here.delivered()
        held.rf.http.post(f"{here.base}/mail/messages", json={})
        for path in ("/v1/environments/a", "/v1/staging/../environments/a"):
            with pytest.raises((Denied, InvalidRequest)):
                held.rf.http.delete(f"{here.base}{path}")
        held.refused(Denied, lambda: held.rf.http.post(f"{here.base}/v1/environments", json={}))
        verdict, rules, reason = explained(held)
        assert verdict == "deny"
        assert "environment: prod" in rules[0] + reason
        assert here.delivered() == before + 1
    finally:
        here.ceilings("")
    # Or the manifest says by itself where its agent belongs.
    pinned = here.scene.hold(allow=[f'http.*: "{here.base}/**"'], more="environment: staging")
    pinned.refused(Denied, lambda: pinned.rf.http.post(f"{here.base}/v1/environments", json={}))
    assert here.delivered() == before + 1


# -- the deploy that a stale page justified ----------------------------------------------------------------------------


def test_a_deploy_does_not_rest_on_a_page_that_has_changed(here: World) -> None:
    """The runbook that the agent had read was not the one in force any more."""
    held = here.scene.hold(
        allow=[f'http.post: "{here.base}/mail/deploys"', 'fs.*: "/workspace/**"'],
        more="""
when:
  - {action: http.post, require: {fresh: 15m, of: [{fs.read: "/workspace/runbook.md"}]}}
""",
        files={"runbook.md": "deploy with flag A"},
    )
    before = here.delivered()

    def deploy() -> Any:
        return held.rf.http.post(f"{here.base}/mail/deploys", json={"flag": "A"})

    unread = held.refused(Stale, deploy)
    assert "nothing was read of" in unread.message
    held.rf.fs.read_text("runbook.md")
    (held.live / "runbook.md").write_text("never deploy with flag A")
    stale = held.refused(Stale, deploy)
    assert "the file changed" in stale.message
    verdict, rules, reason = explained(held)
    assert verdict == "deny"
    assert "fresh: 900s" in rules[0] + reason
    assert here.delivered() == before
    assert held.rf.fs.read_text("runbook.md") == "never deploy with flag A"
    deploy()
    assert here.delivered() == before + 1


# -- two hundred mails after the rule was compacted away ---------------------------------------------------------------

TRASH = """
import sys
from ringfence import agent

with agent.boot() as rf:
    # "Confirm before you act" stood in a context that has been compacted since.
    for number in range(200):
        rf.http.post(sys.argv[1] + f"/messages/{number}/trash")
"""


def test_a_rule_that_no_context_holds_is_not_lost_with_it(here: World) -> None:
    """The inbox was to be looked at, and nothing trashed without a word: until the context was compacted."""
    before = here.delivered()
    agent = here.scene.submit(
        TRASH.replace("sys.argv[1]", repr(f"{here.base}/mail")), ask=[f'http.post: "{here.base}/mail/**"']
    )
    eventually(lambda: here.scene.show(agent)["state"] == "parked", "the agent does not wait")
    waits = here.scene.operator.ask("Approvals", agent=agent)["approvals"]
    assert [one["resource"] for one in waits] == [f"{here.base}/mail/messages/0/trash"]
    # Killed and started again, with nothing of its context left, it waits at the same place.
    here.scene.kill_program(agent)
    eventually(lambda: here.scene.show(agent)["process"] == "live", "the agent is not started again")
    assert len(here.scene.operator.ask("Approvals", agent=agent)["approvals"]) == 1
    told = here.scene.operator.ask("PolicyExplain", agent=agent, step=waits[0]["step"])
    assert (told["verdict"], [rule["text"] for rule in told["rules"]]) == (
        "ask",
        [f'http.post: "{here.base}/mail/**"'],
    )
    # And it can be stopped from anywhere.
    here.scene.operator.ask("Kill", agent=agent)
    assert here.delivered() == before


def test_a_total_stops_what_a_rule_allows(here: World) -> None:
    before = here.delivered()
    agent = here.scene.submit(
        TRASH.replace("sys.argv[1]", repr(f"{here.base}/mail")),
        allow=[f'http.post: "{here.base}/mail/**"'],
        more="budgets: {total: {calls: 25}}",
    )
    eventually(lambda: here.scene.show(agent)["state"] == "parked", "the agent is not stopped")
    assert here.delivered() - before == 25
    assert "calls" in here.scene.show(agent)["waiting_for"]
    here.scene.operator.ask("Kill", agent=agent)


# -- two agents that called each other for ever ------------------------------------------------------------------------

TALK = """
import json, sys
from ringfence import agent

job = json.load(sys.stdin)
with agent.boot() as rf:
    if job["first"]:
        rf.messages.send(job["to"], "please verify")
    while True:
        heard = rf.messages.receive()
        rf.messages.send(job["to"], "please verify once more")
"""


def test_two_agents_that_ask_each_other_for_ever_come_to_an_end(here: World) -> None:
    """Analyser and verifier sent each other work for eleven days; nobody had set a limit that stops."""
    scene = here.scene
    names = [scene.name("analyser"), scene.name("verifier")]
    agents = [
        _talker(here, name, other, first=number == 0)
        for number, (name, other) in enumerate((names, names[::-1]))
    ]
    eventually(
        lambda: any(scene.show(agent)["state"] == "parked" for agent in agents),
        "neither agent comes to an end",
    )
    parked = next(agent for agent in agents if scene.show(agent)["state"] == "parked")
    assert "calls" in scene.show(parked)["waiting_for"]
    for agent in agents:
        made = [step for step in scene.operator.steps(agent) if step["action"].startswith("messages.")]
        assert len([step for step in made if step["outcome"] == "ok"]) <= 40
        scene.operator.ask("Kill", agent=agent)


def _talker(here: World, name: str, other: str, *, first: bool) -> str:
    from support.scenes import manifest_of

    text = manifest_of(
        name,
        ["python", "agent.py"],
        allow=[f'messages.send: "{other}"', 'messages.receive: "*"'],
        more="budgets: {total: {calls: 40}}",
    )
    job = json.dumps({"to": other, "first": first}).encode()
    return here.scene.operator.submit(text, {"agent.py": TALK}, input_bytes=job)


# -- approved, revoked, rolled back, tried again -----------------------------------------------------------------------


def test_a_rollback_brings_no_right_back(here: World) -> None:
    """The approval lies before the revocation, and the rollback before both: the retry is denied all the same."""
    held = here.scene.hold(ask=[f'http.post: "{here.base}/mail/**"'], allow=['fs.*: "/workspace/**"'])
    before = here.delivered()
    held.rf.fs.write_text("draft", "one")
    step = held.last()["step"]

    def send() -> Any:
        return held.rf.http.post(f"{here.base}/mail/messages", json={"to": "all"})

    sending = held.rf.thread(send)
    eventually(lambda: bool(_waiting(held)), "nothing waits")
    held.operator.ask("Approve", id=_waiting(held)[0]["id"])
    assert sending.result().status == 200
    assert here.delivered() == before + 1
    revoked = held.operator.ask("Revoke", agent=held.id, rule_or_grant="http.post")
    assert len(revoked["revoked"]) == 1
    held.operator.ask("Rollback", agent=held.id, to=str(step), start=True)
    held.again()
    # The program runs from its first line: what it had done by then is answered from the record.
    held.rf.fs.write_text("draft", "one")
    denied = held.refused(Denied, send)
    assert "nothing allows" in denied.message
    assert explained(held)[0] == "deny"
    assert _waiting(held) == []
    assert here.delivered() == before + 1


def _waiting(held: Held) -> list[dict[str, Any]]:
    return held.operator.ask("Approvals", agent=held.id)["approvals"]
