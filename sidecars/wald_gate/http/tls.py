"""TLS: the files of certificates and when they expire, and handshakes that report a refused client certificate.

Sources: RFC 5280, section 4.1, for the fields of a certificate; X.690, section 8, for their encoding.
"""

from __future__ import annotations

import logging
import re
import ssl
import time
from base64 import b64decode
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import UTC, datetime
from pathlib import Path

from wald.errors import InvalidInput
from wald_gate.auth.tokens import read_secure_file
from wald_gate.limits import ConnectionPool, Ended

CLIENT: ContextVar[str] = ContextVar("client", default="a client")
"""Address at the other end of the handshake."""
_READS_AFTER_REFUSAL = 8  # before the close: closing a socket with unread data would discard the alert
_REPORT_SECONDS = 10.0  # between log lines with the same reason
# What OpenSSL loads: a line that begins with anything else, as a comment or a space, is ignored.
_PEM = re.compile(rb"^-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)^-----END", re.DOTALL | re.MULTILINE)
_VERSION, _UTC_TIME = 0xA0, 0x17
_VALIDITY = 3  # after the serial number, the algorithm and the issuer
_LONG = 0x80  # the length is in the number of bytes that the other bits give
_CENTURY = 50  # two-digit years of 50 and above are of the 1900s
_log = logging.getLogger("wald_gate")


class TlsContext(ssl.SSLContext):
    """Certificates of the gate and of client CAs."""

    authorities: frozenset[bytes] = frozenset()  # in base64; ``get_ca_certs`` omits those that may not sign

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if isinstance(made, Handshake):
            made.incoming = incoming
        return made


class Handshake(ssl.SSLObject):
    """TLS handshake that sends the alert for a refused certificate; asyncio and uvloop do not send it.

    ``pool`` and ``reported`` are set in a subclass for each server.
    """

    pool: ConnectionPool
    incoming: ssl.MemoryBIO  # data from the client that OpenSSL has not read
    reported: dict[str, float]  # by reason, the monotonic time of the last log line
    _failure: ssl.SSLCertVerificationError | None = None
    _reads = 0

    def do_handshake(self) -> None:
        if self._failure is None:
            try:
                super().do_handshake()
            except ssl.SSLCertVerificationError as error:
                self._failure = error
                self._report(error.verify_message)
            else:
                return
        self._reads += 1
        self.incoming.read()  # OpenSSL no longer reads, and the data would be kept as long as the connection
        if self._reads > _READS_AFTER_REFUSAL:
            raise self._failure
        raise ssl.SSLWantReadError  # the alert has to be sent

    def _report(self, reason: str) -> None:
        self.pool.ended[Ended.CERTIFICATE] += 1
        now = time.monotonic()
        if now - self.reported.get(reason, float("-inf")) >= _REPORT_SECONDS:
            self.reported[reason] = now
            _log.warning("wald-gate: the certificate of %s is refused: %s", CLIENT.get(), reason)


def server_context(certificate: Path, key: Path, client_ca: Path | None) -> TlsContext:
    """Read the certificates from PEM files, the first two of which may be the same; the CA is optional."""
    context = TlsContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if b"PRIVATE KEY-----" not in _read(key):
        raise InvalidInput(f"{key}: the file has no private key", hint=f"--certificate {certificate} --key FILE")
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate)  # load_cert_chain does not say which file is wrong
    try:
        context.load_cert_chain(certificate, key, password=lambda: _reject_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidInput(
                f"{certificate}: the key in {key} belongs to another certificate",
                hint=f"openssl x509 -noout -pubkey -in {certificate}; openssl pkey -pubout -in {key}",
            ) from None
        raise InvalidInput(f"{key}: the private key is damaged", hint=f"openssl pkey -noout -in {key}") from None
    if client_ca is not None:
        context.authorities = frozenset(certificates(_read(client_ca)))
        _load(context, client_ca)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def certificates(pem: bytes) -> list[bytes]:
    """Return the certificates in a PEM file, each in base64 without line breaks."""
    return [b"".join(each.split()) for each in _PEM.findall(pem)]


def first_expiry(path: Path) -> float:
    """Return when the first certificate in a PEM file expires, in seconds since 1970; ValueError without one."""
    return min(expiry(b64decode(each)) for each in certificates(path.read_bytes()))


def expiry(certificate: bytes) -> float:
    """Return when a DER certificate expires, in seconds since 1970; raise ValueError for other data."""
    try:
        _, whole = next(_elements(certificate))  # in a trusted certificate, a second element gives its purposes
        _, signed = next(_elements(whole))
        fields = [value for tag, value in _elements(signed) if tag != _VERSION]
        _, (tag, text) = _elements(fields[_VALIDITY])
        digits = text.decode("ascii")
        if tag == _UTC_TIME:
            digits = ("19" if int(digits[:2]) >= _CENTURY else "20") + digits
        return datetime.strptime(digits, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (IndexError, StopIteration, ValueError) as error:
        raise ValueError("not a certificate") from error


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the tag and the content of each DER element."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & _LONG:
            size = length - _LONG
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > len(data):
            raise ValueError("an element is truncated")
        yield tag, data[at : at + length]
        at += length


def _read(path: Path) -> bytes:
    try:
        return read_secure_file(path)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", hint=f"ls -l {path}") from None


def _load(context: ssl.SSLContext, path: Path) -> None:
    """Trust the certificates in a file."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        is_missing = error.reason == "NO_CERTIFICATE_OR_CRL_FOUND"
        what = "the file has no certificate" if is_missing else "a certificate in it is damaged"
        raise InvalidInput(f"{path}: {what}", hint=f"openssl x509 -noout -text -in {path}") from None
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", hint=f"ls -l {path}") from None


def _reject_password(key: Path) -> str:
    """Refuse a key with a password: OpenSSL would prompt for it on the terminal, even during a reload."""
    raise InvalidInput(f"{key}: the key has a password", hint=f"openssl pkey -in {key} -out NEW removes it")
