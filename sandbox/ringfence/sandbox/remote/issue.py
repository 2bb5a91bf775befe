"""Makes the private authority and the short-lived certificates of sandbox hosts and kernels.

The authority's key is only ever used here. It is to be kept where neither a kernel nor a host runs.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import os
import re
from pathlib import Path
from typing import Literal

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from ringfence.sandbox.remote.tls import CA_FILE, CERT_FILE, KEY_FILE, PEERS_FILE, USAGES, CertificateError

Role = Literal["host", "kernel"]

CA_KEY_FILE = "ca-key.pem"
CA_DAYS = 3650
_BACKDATED = dt.timedelta(minutes=5)
"""A clock that is a little behind still finds a new certificate valid."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?(\.[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?){0,7}").fullmatch


def make_authority(directory: Path, days: float = CA_DAYS) -> None:
    """Make a new authority.

    Args:
        directory: for its certificate and its key; it is made.
        days: until it expires.

    Raises:
        CertificateError: there is one already.
        OSError: the files can't be written.
    """
    if (directory / CA_KEY_FILE).exists() or (directory / CA_FILE).exists():
        raise CertificateError(f"`{directory}` holds an authority already; name another directory")
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name("Ringfence sandbox authority")
    builder = (
        _begun(name, name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs=True), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )
    certificate = builder.sign(key, hashes.SHA256())
    _write(directory / CA_KEY_FILE, _key_pem(key), 0o600)
    _write(directory / CA_FILE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)


def issue(
    authority: Path, directory: Path, role: Role, name: str, *, peers: tuple[str, ...], days: float
) -> dt.datetime:
    """Make a certificate, and everything else that one end needs, in a directory of its own; an older one is replaced.

    Args:
        authority: directory of `make_authority`.
        directory: to hand to that end; it is made.
        role: of that end. The certificate of one role is of no use in the other.
        name: of that end; what its peers pin.
        peers: names that this end is to accept of the others.
        days: until it expires.

    Returns:
        When it expires.

    Raises:
        CertificateError: a name can't be used, or the authority can't be read.
        OSError: the files can't be written.
    """
    for one in (name, *peers):
        if not _NAME(one):
            raise CertificateError(
                f"`{one}` can't be a name of a certificate; use small letters, digits, hyphens and dots"
            )
    ca, ca_key = _authority(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = (
        _begun(_name(name), ca.subject, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(USAGES[role]), critical=True)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
    )
    certificate = builder.sign(ca_key, hashes.SHA256())
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    _write(directory / CA_FILE, ca.public_bytes(serialization.Encoding.PEM), 0o644)
    _write(directory / PEERS_FILE, "".join(f"{peer}\n" for peer in peers).encode(), 0o644)
    # The key and the certificate are one file: an end that reads them while they are replaced gets a pair.
    pair = _key_pem(key) + certificate.public_bytes(serialization.Encoding.PEM)
    _write(directory / KEY_FILE, pair, 0o600)
    _write(directory / CERT_FILE, certificate.public_bytes(serialization.Encoding.PEM), 0o644)
    return certificate.not_valid_after_utc


def _authority(directory: Path) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        ca = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
        key = serialization.load_pem_private_key((directory / CA_KEY_FILE).read_bytes(), None)
    except FileNotFoundError as error:
        raise CertificateError(f"`{directory}` holds no authority: `{error.filename}` is missing") from error
    except (ValueError, TypeError) as error:
        raise CertificateError(
            f"the authority in `{directory}` can't be read: {error}; make a new one"
        ) from error
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise CertificateError(f"the authority in `{directory}` has a key of another kind; make a new one")
    with contextlib.suppress(InvalidSignature):
        ca.verify_directly_issued_by(ca)
        if ca.public_key() == key.public_key():
            return ca, key
    raise CertificateError(f"key and certificate of the authority in `{directory}` don't belong together")


def _begun(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: float
) -> x509.CertificateBuilder:
    now = dt.datetime.now(dt.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(min(now, now + dt.timedelta(days=days)) - _BACKDATED)
        .not_valid_after(now + dt.timedelta(days=days))
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text[:64])])


def _usage(*, signs: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs,
        key_cert_sign=signs,
        crl_sign=signs,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _write(path: Path, data: bytes, mode: int) -> None:
    """Replace a file as a whole."""
    fresh = path.with_name(f".{path.name}.new")
    fresh.unlink(missing_ok=True)
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, mode)
    with open(fd, "wb") as file:  # noqa: PTH123 - a descriptor
        file.write(data)
        file.flush()
        os.fsync(fd)
    fresh.rename(path)
