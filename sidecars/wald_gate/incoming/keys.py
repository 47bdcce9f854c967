"""``Idempotency-Key`` (draft-ietf-httpapi-idempotency-key-header-07): the name that a client gives to a request.

A key belongs to a client and a route: another client, or another route, may use the same words.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b

from wald.errors import InvalidInput

HEADER = "idempotency-key"
REPLAYED = "Idempotency-Replayed"
KEY_BYTES = 16
_MAX_LENGTH = 255
_STRING = re.compile(r'"((?:[\x20\x21\x23-\x5b\x5d-\x7e]|\\["\\])*)"')  # RFC 8941, section 3.3.3
_PLAIN = re.compile(r"[\x21\x23-\x7e]+")
_SPACED = re.compile(r"[\x20\x21\x23-\x7e]+")


def key_of(fields: Sequence[str], client: str, route: str) -> bytes | None:
    """The key of a request, in 16 bytes that are different for each client and route; None if it has none.

    Args:
        fields: the values of its ``Idempotency-Key``: a string in quotes as the draft has it, or the same without
            them, as most clients send it.

    Raises:
        InvalidInput: it is no such string, longer than 255 characters, or there are two.
    """
    if not fields:
        return None
    if len(fields) > 1:
        raise InvalidInput("duplicate Idempotency-Key header", hint=_HINT)
    field = fields[0].strip()
    quoted = _STRING.fullmatch(field)
    text = re.sub(r"\\(.)", r"\1", quoted[1]) if quoted else field
    if not text or len(text) > _MAX_LENGTH:
        raise InvalidInput(f"Idempotency-Key has {len(text)} characters; 1 to {_MAX_LENGTH} are allowed", hint=_HINT)
    if not (quoted or _PLAIN.fullmatch(field)):
        shown = field[:40].encode("latin-1").decode(errors="replace")
        wrong = "has a space, and no quotes around it" if _SPACED.fullmatch(field) else "has more than plain ASCII"
        raise InvalidInput(f"Idempotency-Key {shown!r} {wrong}", hint=_HINT)
    digest = blake2b(digest_size=KEY_BYTES)
    for part in (client, route, text):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(4, "little") + encoded)
    return digest.digest()


_HINT = 'Idempotency-Key: "8e03978e-40d5-43e8-bc93-6894a57f9324", as uuidgen makes them'
