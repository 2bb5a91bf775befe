"""Mutual TLS 1.3 against a private authority, and in words what is wrong where it does not come about."""

from __future__ import annotations

import datetime as dt
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.x509.oid import ExtendedKeyUsageOID

CA_FILE, CERT_FILE, KEY_FILE, PEERS_FILE = "ca.pem", "cert.pem", "key.pem", "peers"
"""Of one end. `key.pem` holds its key and its certificate; `peers` the names it accepts, one a line."""
USAGES = {"host": (ExtendedKeyUsageOID.SERVER_AUTH,), "kernel": (ExtendedKeyUsageOID.CLIENT_AUTH,)}
"""What the certificate of each role is for: that, and nothing else."""
ROLES = {"host": "a sandbox host", "kernel": "a kernel"}
_RENEW = "make a new one with `ringfence sandbox-certs`"


class CertificateError(Exception):
    """A certificate is missing, expired or of another authority; `str()` is one line for the user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """What one end proves itself with.

    Attributes:
        directory: where it was read from.
        name: of this end.
        peers: names that it accepts.
        expires: when its certificate does.
    """

    directory: Path
    name: str
    peers: tuple[str, ...]
    expires: dt.datetime

    @classmethod
    def load(cls, directory: Path, role: str) -> Credentials:
        """Read a directory that `issue` made.

        Args:
            directory: where.
            role: of this end, `host` or `kernel`.

        Raises:
            CertificateError: something is missing, expired, of another authority, for another role, or readable for others.
        """
        try:
            ca = x509.load_pem_x509_certificate((directory / CA_FILE).read_bytes())
            own = x509.load_pem_x509_certificate((directory / KEY_FILE).read_bytes())
            peers = tuple((directory / PEERS_FILE).read_text(encoding="utf-8").split())
            mode = (directory / KEY_FILE).stat().st_mode
        except OSError as error:
            reason = (error.strerror or str(error)).lower()
            raise CertificateError(f"`{error.filename}` can't be read: {reason}; {_RENEW}") from error
        except ValueError as error:
            raise CertificateError(f"a certificate in `{directory}` can't be read; {_RENEW}") from error
        if mode & 0o077:
            raise CertificateError(
                f"others can read the key `{directory / KEY_FILE}`; run `chmod 600` on it, or replace it"
            )
        if not peers:
            raise CertificateError(f"`{directory / PEERS_FILE}` names nobody to talk with; {_RENEW}")
        try:
            own.verify_directly_issued_by(ca)
        except (ValueError, TypeError, InvalidSignature) as error:
            raise CertificateError(
                f"the certificate in `{directory}` is not of the authority beside it; {_RENEW}"
            ) from error
        now = dt.datetime.now(dt.UTC)
        for what, certificate in (("certificate", own), ("authority", ca)):
            if now > certificate.not_valid_after_utc:
                raise CertificateError(
                    f"the {what} in `{directory}` expired at {_time(certificate.not_valid_after_utc)}; {_RENEW}"
                )
            if now < certificate.not_valid_before_utc:
                raise CertificateError(
                    f"the {what} in `{directory}` counts only from {_time(certificate.not_valid_before_utc)} on; "
                    "set this machine's clock"
                )
        if not has_role(own, role):
            raise CertificateError(f"the certificate in `{directory}` is not one for {ROLES[role]}; {_RENEW}")
        names = own.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return cls(
            directory=directory,
            name=names.get_values_for_type(x509.DNSName)[0],
            peers=peers,
            expires=own.not_valid_after_utc,
        )

    def context(self, *, server: bool) -> ssl.SSLContext:
        """A context that offers and takes TLS 1.3 only, and that demands a certificate of the other end.

        Raises:
            CertificateError: key or certificate are damaged.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        if server:
            context.num_tickets = 0
        self.fill(context)
        return context

    def fill(self, context: ssl.SSLContext) -> None:
        """Put key, certificate and authority into a context; connections made from now on use them.

        Raises:
            CertificateError: as for `context`.
        """
        try:
            context.load_verify_locations(self.directory / CA_FILE)
            context.load_cert_chain(self.directory / KEY_FILE)
        except (ssl.SSLError, OSError) as error:
            raise CertificateError(
                f"key and certificate in `{self.directory}` don't belong together; {_RENEW}"
            ) from error


def has_role(certificate: x509.Certificate | bytes | None, role: str) -> bool:
    """Whether a certificate, as read or as DER, is for this role and no other.

    TLS itself takes one that says nothing of its use, and one that is for both.
    """
    if certificate is None:
        return False
    if isinstance(certificate, bytes):
        certificate = x509.load_der_x509_certificate(certificate)
    try:
        usage = certificate.extensions.get_extension_for_class(x509.ExtendedKeyUsage).value
    except x509.ExtensionNotFound:
        return False
    return tuple(usage) == USAGES[role]


def names_of(certificate: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Names of a peer's certificate as `ssl` gives it."""
    return tuple(value for kind, value in (certificate or {}).get("subjectAltName", ()) if kind == "DNS")


def seconds_left(certificate: Mapping[str, Any] | None) -> float:
    """How long a peer's certificate still counts."""
    text = (certificate or {}).get("notAfter")
    now = dt.datetime.now(dt.UTC).timestamp()
    return 0.0 if text is None else ssl.cert_time_to_seconds(text) - now


def in_words(error: BaseException, peer: str) -> str:
    """Why TLS did not come about.

    Args:
        error: what `ssl` or the connection raised.
        peer: how the other end is called in a message, such as "the sandbox host `a:1`".
    """
    if isinstance(error, ssl.SSLCertVerificationError):
        found = error.verify_message.lower()
        if "expired" in found:
            return f"the certificate of {peer} has expired; make it a new one with `ringfence sandbox-certs`"
        if "not yet valid" in found:
            return f"the certificate of {peer} is not valid yet; set the clocks"
        if "hostname" in found or "name" in found:
            return f"{peer} is not who is expected: {found}; look at `{PEERS_FILE}` among the certificates"
        return f"the certificate of {peer} is of another authority ({found}); give both ends one authority"
    text = str(getattr(error, "reason", None) or error).lower().replace("_", " ")
    alerts = {
        "unknown ca": "it does not know this end's authority; give both ends one authority",
        "certificate expired": "it finds this end's certificate expired; renew it, or set the clocks",
        "bad certificate": "it refuses this end's certificate; look at its log",
        "certificate required": "it demands a certificate; look at this end's certificates",
        "unsupported certificate": "it refuses the kind of this end's certificate; a kernel's is no host's",
        "wrong version number": "it does not speak TLS",
        "record layer failure": "it does not speak TLS",
        "protocol version": "it does not speak TLS 1.3",
        "internal error": "it failed; look at its log",
    }
    for alert, words in alerts.items():
        if alert in text:
            return f"{peer} can't be used: {words}"
    return f"{peer} can't be reached: {text.strip() or 'the connection was closed'}"


def _time(moment: dt.datetime) -> str:
    return moment.strftime("%Y-%m-%dT%H:%M:%SZ")
