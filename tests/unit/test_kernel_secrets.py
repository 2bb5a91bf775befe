from __future__ import annotations

import os
import traceback

import pytest
from ringfence.kernel.secrets import MAX_BYTES, Secrets, SecretsError

CANARY = b"canary-b51f"


@pytest.fixture
def root(tmp_path):
    return tmp_path / "secrets"


@pytest.fixture
def secrets(root):
    return Secrets(root)


def test_a_secret_is_kept_replaced_listed_and_forgotten(secrets):
    assert secrets.list() == []
    secrets.set("crm-dsn", b"one")
    secrets.set("token", b"\x00\xff")
    secrets.set("crm-dsn", b"two")
    assert secrets.list() == ["crm-dsn", "token"]
    assert (secrets.get("crm-dsn"), secrets.get("token")) == (b"two", b"\x00\xff")
    secrets.remove("token")
    assert secrets.list() == ["crm-dsn"]
    with pytest.raises(SecretsError, match="there is no secret `token`"):
        secrets.get("token")
    with pytest.raises(SecretsError, match="there is no secret `token`"):
        secrets.remove("token")


def test_files_are_private_whatever_the_umask(secrets, root):
    before = os.umask(0)
    try:
        secrets.set("a", CANARY)
    finally:
        os.umask(before)
    assert root.stat().st_mode & 0o777 == 0o700
    assert [path.stat().st_mode & 0o777 for path in root.iterdir()] == [0o600]


@pytest.mark.parametrize(
    "name", ["", ".", "..", ".hidden", "a/b", "../a", "a b", "a\n", "ä", "x" * 65, "-a", "a\0b"]
)
def test_bad_names_are_refused_everywhere(secrets, root, name):
    secrets.set("good", b"x")
    for call in (lambda: secrets.set(name, CANARY), lambda: secrets.get(name), lambda: secrets.remove(name)):
        with pytest.raises(SecretsError, match="a secret's name has letters"):
            call()
    assert [path.name for path in root.iterdir()] == ["good"]


def test_sizes_are_bounded(secrets):
    secrets.set("most", b"x" * MAX_BYTES)
    assert len(secrets.get("most")) == MAX_BYTES
    with pytest.raises(SecretsError, match="at most"):
        secrets.set("more", b"x" * (MAX_BYTES + 1))
    with pytest.raises(SecretsError, match="is empty"):
        secrets.set("none", b"")


def test_values_are_never_shown(secrets, root):
    secrets.set("a", CANARY)
    shown = repr(secrets) + str(secrets) + repr(vars(secrets))
    (root / "a").chmod(0o644)
    with pytest.raises(SecretsError) as caught:
        secrets.get("a")
    shown += "".join(traceback.format_exception(caught.value))
    with pytest.raises(SecretsError) as caught:
        secrets.set("a/b", CANARY)
    shown += str(caught.value)
    assert CANARY.decode() not in shown


def test_a_secret_open_to_others_is_refused(secrets, root):
    secrets.set("a", CANARY)
    (root / "a").chmod(0o640)
    with pytest.raises(SecretsError, match="open to other users"):
        secrets.get("a")
    secrets.set("a", CANARY)
    assert secrets.get("a") == CANARY
    root.chmod(0o711)
    with pytest.raises(SecretsError, match="open to other users"):
        secrets.get("a")
    with pytest.raises(SecretsError, match="open to other users"):
        secrets.set("a", CANARY)


def test_a_link_is_not_followed(secrets, root, tmp_path):
    secrets.set("a", b"x")
    outside = tmp_path / "outside"
    outside.write_bytes(CANARY)
    outside.chmod(0o600)
    (root / "link").symlink_to(outside)
    with pytest.raises(SecretsError, match="can't be read"):
        secrets.get("link")
    secrets.set("link", b"mine")
    assert outside.read_bytes() == CANARY
    assert secrets.get("link") == b"mine"


def test_a_directory_in_the_way_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(SecretsError, match=r"`.*file/secrets`: not a directory"):
        Secrets(tmp_path / "file" / "secrets").set("a", b"x")
