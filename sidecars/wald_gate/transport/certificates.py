"""The files of TLS: read, with errors that name the one that is wrong."""

from __future__ import annotations

import ssl
from pathlib import Path

from wald.errors import InvalidInput
from wald_gate.guarded import read_guarded
from wald_gate.transport.alerts import Context
from wald_gate.transport.expiry import certificates


def server_context(certificate: Path, key: Path, authorities: Path | None) -> Context:
    """What the gate shows, and which certificates it takes from clients.

    Args:
        certificate, key: files in PEM, or one that has both.
        authorities: certificates of which a client may show a descendant; None: none is asked for.

    Raises:
        InvalidInput: a file cannot be read, others may write the key or the authorities, or the key belongs to
            another certificate.
    """
    context = Context(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    if b"PRIVATE KEY-----" not in _content(key):
        raise InvalidInput(f"{key}: there is no private key in it", hint=f"--certificate {certificate} --key FILE")
    _load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), certificate)  # the error of both files together does not say which
    try:
        context.load_cert_chain(certificate, key, password=lambda: _has_password(key))
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise InvalidInput(
                f"{certificate}: the key in {key} belongs to another certificate",
                hint=f"openssl x509 -noout -pubkey -in {certificate}; openssl pkey -pubout -in {key}",
            ) from None
        raise InvalidInput(f"{key}: the private key is damaged", hint=f"openssl pkey -noout -in {key}") from None
    if authorities is not None:
        context.authorities = frozenset(certificates(_content(authorities)))
        _load(context, authorities)
        context.verify_mode = ssl.CERT_OPTIONAL
    return context


def _content(path: Path) -> bytes:
    """Of a file that other users may not write."""
    try:
        return read_guarded(path)
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", hint=f"ls -l {path}") from None


def _load(context: ssl.SSLContext, path: Path) -> None:
    """Trust the certificates of a file."""
    try:
        context.load_verify_locations(path)
    except ssl.SSLError as error:
        is_missing = error.reason == "NO_CERTIFICATE_OR_CRL_FOUND"
        what = "there is no certificate in it" if is_missing else "a certificate in it is damaged"
        raise InvalidInput(f"{path}: {what}", hint=f"openssl x509 -noout -text -in {path}") from None
    except OSError as error:
        raise InvalidInput(f"{path}: {error.strerror}", hint=f"ls -l {path}") from None


def _has_password(key: Path) -> str:
    """In place of a question on the terminal, which would wait there at a reload.

    Raises:
        InvalidInput: always.
    """
    raise InvalidInput(f"{key}: the key has a password", hint=f"openssl pkey -in {key} -out NEW removes it")
