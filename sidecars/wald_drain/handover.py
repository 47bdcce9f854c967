"""What is being handed over to another route, in a file that is also the lock of its route and group.

    routes/<route>/<group>.drain    empty, or one line of JSON: {"after": 10, "first": 11, "last": 20, …, "crc": "…"}

The line is there before the first record is sent, and goes after the cursor has moved. So after a crash in between the
next start finishes exactly this handover, whatever has arrived since and whatever options it got: the daemon recognises
what it has already.
"""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Self

from wald.errors import Locked
from wald.store.files.directory import Root
from wald.store.files.disk import Disk
from wald_drain.line import decode_line, encode_line

_LINE_MAX_BYTES = 4096  # some ten times what is ever written


@dataclass(frozen=True, slots=True)
class Handover:
    """Records that the command was given in vain, or dead letters on their way back.

    Attributes:
        after: the cursor before; the handover is finished once it has moved.
        reason, tries: why the command did not process them.
        dead_letter: the route that gets them; None: they are dead letters, and each goes to where it came from.
        at_ns: when this was decided, ns since 1970. The same records handed over again are another handover.
    """

    after: int
    first: int
    last: int
    reason: str
    tries: int
    dead_letter: str | None
    at_ns: int


def encode_handover(handover: Handover) -> bytes:
    """The line."""
    return encode_line(asdict(handover))


def decode_handover(line: bytes) -> Handover | None:
    """What a line says; None for one that was half written, when nothing had been sent yet."""
    told = decode_line(line)
    try:
        return None if told is None else Handover(**told)
    except TypeError:
        return None


class HandoverFile:
    """The right to drain ``route`` for ``group``, held until it is closed.

    Raises:
        NotFound: no such route.
        Locked: somebody else drains it for this group.
    """

    def __init__(self, root: Root, route: str, group: str, disk: Disk) -> None:
        root.require_route(route)
        path = root.route(route) / f"{group}.drain"
        self._disk = disk
        self._descriptor = disk.open_lock(path)
        try:
            if not disk.lock(self._descriptor):
                raise Locked(
                    f"{path}: another wald-drain is at work on route {route} for group {group}",
                    hint=f"wait until it is done, or look for it: fuser {path}",
                )
            disk.sync_directory(path.parent)
        except (Locked, OSError):
            disk.close(self._descriptor)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disk.close(self._descriptor)

    def begun(self) -> Handover | None:
        """The handover under way."""
        return decode_handover(os.pread(self._descriptor, _LINE_MAX_BYTES, 0))

    def begin(self, handover: Handover) -> None:
        """Say what is to be handed over; on disk when this returns."""
        self._disk.truncate(self._descriptor, 0)
        self._disk.write(self._descriptor, [encode_handover(handover)], 0)
        self._disk.sync(self._descriptor)

    def end(self) -> None:
        """Say that nothing is."""
        self._disk.truncate(self._descriptor, 0)
        self._disk.sync(self._descriptor)
