"""Addresses: what names a directory of this machine, however it is written, and what does not."""

from __future__ import annotations

import re

from wald.errors import InvalidInput

_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*):(?=/)(//(?P<host>[^/]*))?")


def is_remote(address: str) -> bool:
    """Whether ``address`` is a URL of something other than a directory.

    >>> is_remote("s3://lake/logs"), is_remote("file:///spool"), is_remote("/spool"), is_remote("a:b")
    (True, False, False, False)
    """
    match = _SCHEME.match(address)
    return match is not None and not _is_file(match)


def local_path(address: str, *, hint: str) -> str:
    """The path that ``address`` names: the address itself, or what follows ``file://``.

    >>> local_path("file:///spool", hint=""), local_path("file:/spool", hint=""), local_path("spool", hint="")
    ('/spool', '/spool', 'spool')

    Raises:
        InvalidInput: it is a URL of something else; taken for a path it would name a directory ``s3:`` right here.
    """
    match = _SCHEME.match(address)
    if match is None:
        return address
    if not _is_file(match):
        raise InvalidInput(f"{address}: a URL, and this has to be a directory", hint=hint)
    return address[match.end() :]


def _is_file(match: re.Match[str]) -> bool:
    return match["scheme"].lower() == "file" and match["host"] in (None, "", "localhost")
