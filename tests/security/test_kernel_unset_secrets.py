"""A kernel file may name a secret before it is set: its resource is refused until then, and works from then on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ringfence.agent import NoSuchResource
from support.kernels import Refused
from support.scenes import Scene, console, scene_of_its_own
from support.target import Target

pytestmark = [pytest.mark.sandbox, pytest.mark.postgres]

CONFIG = """
apiVersion: ringfence/v1
kind: Kernel
spec:
  resources:
    api: {{type: http, base: "{base}", auth: {{bearer: {{secret: api-token}}}}}}
    crm: {{type: postgres, dsn: {{secret: crm-dsn}}}}
"""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    made = Target(tmp_path_factory.mktemp("target") / "journal")
    yield made
    made.close()


@pytest.fixture
def scene(postgres_server: Any, template_database: str, target: Target) -> Iterator[Scene]:
    config = CONFIG.format(base=target.base)
    with scene_of_its_own(postgres_server, template_database, config=config) as scene:
        yield scene


def test_an_unset_secret_refuses_its_resource_alone_until_it_is_set(
    scene: Scene, target: Target, tmp_path: Path
) -> None:
    held = scene.hold(
        allow=[f'http.get: "{target.base}/**"', "sql.read: {database: crm}", 'fs.*: "/workspace/**"']
    )
    refused = held.refused(NoSuchResource, lambda: held.rf.http.get(f"{target.base}/early/ok"))
    text = (
        "resource `api` is unavailable: secret `api-token` is not set; "
        "the operator sets it: ringfence secrets set api-token"
    )
    assert str(refused) == text
    refused = held.refused(NoSuchResource, lambda: held.rf.sql.query("crm", "select 1"))
    assert "secret `crm-dsn` is not set" in str(refused)
    assert target.deliveries("/early/ok") == []
    held.rf.fs.write_text("a.txt", "others go on")

    data = str(scene.kernel.data)
    status = console("status", "--data", data, "--json")
    assert status.returncode == 1  # not well
    unavailable = json.loads(status.stdout)["config"]["unavailable"]
    assert [item["name"] for item in unavailable] == ["api", "crm"]
    assert scene.operator.ask("Show", agent=held.id)["unavailable"] == unavailable
    assert "secrets set crm-dsn" in console("status", "--data", data).stdout
    assert scene.operator.ask("Reload")["unavailable"] == unavailable  # which is no bad file

    value = tmp_path / "value"
    value.write_text("token-1")
    done = console("secrets", "set", "api-token", "--from", str(value), "--data", data)
    assert (done.returncode, done.stdout) == (0, "api-token: set; used by api\n")
    scene.operator.ask("SecretSet", name="crm-dsn", value=str(scene.kernel.dsn).encode())
    # The same program goes on: no reload, no restart.
    assert held.rf.http.get(f"{target.base}/then/ok").status == 200
    assert target.deliveries("/then/ok")[0]["headers"]["authorization"] == "Bearer token-1"
    assert list(held.rf.sql.query("crm", "select 1 as one"))
    assert console("status", "--data", data).returncode == 0


def test_a_removed_secret_ends_the_use_of_its_resource_at_once(scene: Scene, target: Target) -> None:
    held = scene.hold(allow=[f'http.get: "{target.base}/**"'])
    scene.operator.ask("SecretSet", name="api-token", value=b"token-1")
    assert held.rf.http.get(f"{target.base}/first/ok").status == 200
    assert scene.operator.ask("SecretSet", name="api-token", value=b"token-2")["resources"] == ["api"]
    held.rf.http.get(f"{target.base}/second/ok")
    assert target.deliveries("/second/ok")[0]["headers"]["authorization"] == "Bearer token-2"
    scene.operator.ask("SecretRemove", name="api-token")
    held.refused(NoSuchResource, lambda: held.rf.http.get(f"{target.base}/third/ok"))
    assert target.deliveries("/third/ok") == []


def test_a_secret_that_is_no_text_leaves_its_resource_unavailable(scene: Scene, target: Target) -> None:
    held = scene.hold(allow=[f'http.get: "{target.base}/**"', "sql.read: {database: crm}"])
    scene.operator.ask("SecretSet", name="api-token", value=b"\xff\xfe")
    scene.operator.ask("SecretSet", name="crm-dsn", value=b" \n ")
    refused = held.refused(NoSuchResource, lambda: held.rf.http.get(f"{target.base}/bytes/ok"))
    assert "`api-token` is no UTF-8 text" in str(refused)
    # An empty DSN would lead the driver to whatever its defaults are.
    refused = held.refused(NoSuchResource, lambda: held.rf.sql.query("crm", "select 1"))
    assert "nothing but blanks" in str(refused)


def test_a_directory_that_others_may_enter_is_the_hosts_fault(scene: Scene, target: Target) -> None:
    scene.operator.ask("SecretSet", name="api-token", value=b"token-1")
    (scene.kernel.data / "secrets").chmod(0o711)
    with pytest.raises(Refused, match="is open to other users") as refused:
        scene.operator.ask("SecretSet", name="api-token", value=b"token-2")
    assert refused.value.exit_code == 1
    with pytest.raises(Refused, match="no secret `none`; see: ringfence secrets ls") as refused:
        scene.operator.ask("SecretRemove", name="none")
    assert refused.value.exit_code == 4
    scene.operator.ask("Reload")
    held = scene.hold(allow=[f'http.get: "{target.base}/**"'])
    unavailable = held.refused(NoSuchResource, lambda: held.rf.http.get(f"{target.base}/open/ok"))
    assert "is open to other users" in str(unavailable)
    assert target.deliveries("/open/ok") == []
