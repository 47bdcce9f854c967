"""Which certificates a file has, and when they expire: read from them, as :mod:`ssl` says it of a peer's alone.

Sources: RFC 5280, section 4.1, for the fields and their order; X.690, section 8, for how they are written.
"""

from __future__ import annotations

import re
from base64 import b64decode
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

# What OpenSSL loads: a line that begins with anything else, a sign of a comment or a space, is none of it.
_PEM = re.compile(rb"^-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.+?)^-----END", re.DOTALL | re.MULTILINE)
_VERSION, _UTC_TIME = 0xA0, 0x17
_VALIDITY = 3  # behind the serial number, the algorithm and the issuer
_LONG = 0x80  # a length in as many bytes as the other bits say
_CENTURY = 50  # two digits from here on are a year of 1900


def certificates(pem: bytes) -> list[bytes]:
    """Those in a file of PEM, each in base64, without the ends of its lines."""
    return [b"".join(each.split()) for each in _PEM.findall(pem)]


def first_expiry(path: Path) -> float:
    """When the first of the certificates in a file of PEM expires, in seconds since 1970.

    Raises:
        OSError: the file cannot be read.
        ValueError: there is none in it, or one is none.
    """
    return min(expiry(b64decode(each)) for each in certificates(path.read_bytes()))


def expiry(certificate: bytes) -> float:
    """When a certificate in DER expires, in seconds since 1970.

    Raises:
        ValueError: it is none.
    """
    try:
        _, whole = next(_elements(certificate))  # a second one says what a trusted certificate is trusted for
        _, signed = next(_elements(whole))
        fields = [value for tag, value in _elements(signed) if tag != _VERSION]
        _, (tag, text) = _elements(fields[_VALIDITY])
        said = text.decode("ascii")
        if tag == _UTC_TIME:
            said = ("19" if int(said[:2]) >= _CENTURY else "20") + said
        return datetime.strptime(said, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
    except (IndexError, StopIteration, ValueError) as error:
        raise ValueError("this is no certificate") from error


def _elements(data: bytes) -> Iterator[tuple[int, bytes]]:
    """The elements that follow each other: the tag of each, and what it has."""
    at = 0
    while at < len(data):
        tag, length = data[at], data[at + 1]
        at += 2
        if length & _LONG:
            size = length - _LONG
            length = int.from_bytes(data[at : at + size], "big")
            at += size
        if at + length > len(data):
            raise ValueError("an element is cut off")
        yield tag, data[at : at + length]
        at += length
