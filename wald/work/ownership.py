"""The right to work for a group: one process at a time has it, by the lock of its file ``routes/R/cursors/G.drain``."""

from __future__ import annotations

import os
import time

from wald.errors import Locked
from wald.files.cursor_directory import GroupFile
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.locks import holders, process_command, process_name
from wald.format.names import HANDOVER_SUFFIX

_ASKED_SECONDS = 0.1  # another process may hold the lock for an instant, to see whether it is held


class Ownership(GroupFile):
    """The right to work on ``route`` for ``group``, held until it is closed. What is in the file is for who works.

    Raises:
        NotFound: there is no such route.
        Locked: another process works for this group, or this one does already.
        NotPermitted: this user may not.
    """

    def __init__(self, root: Root, route: str, group: str, disk: Disk) -> None:
        super().__init__(root, route, group, HANDOVER_SUFFIX, disk)
        try:
            until = time.monotonic() + _ASKED_SECONDS
            while not self.lock():
                if time.monotonic() < until:
                    time.sleep(_ASKED_SECONDS / 10)
                    continue
                raise self._taken(route, group)
            if not os.fstat(self.descriptor).st_nlink:
                raise Locked(f"{self.path}: the group was removed at this moment", hint="run the same command again")
            disk.sync_directory(self.path.parent)
        except (Locked, OSError):
            self.close()
            raise

    def _taken(self, route: str, group: str) -> Locked:
        """The error about a lock that is held."""
        found = holders(self.path)
        if os.getpid() in found:
            return Locked(
                f"{self.path}: this process works on route {route} for group {group} already",
                hint="use the WorkGroup that is open, also in other threads, or close it first",
            )
        if found:
            command = process_command(found[0]) or process_name(found[0])
            return Locked(
                f"{self.path}: another process works on route {route} for group {group}: process {found[0]}, {command}",
                hint="wait for its end; a wald-gate releases the group 30 s after the last request "
                "if no worker has a record",
            )
        return Locked(
            f"{self.path}: another process works on route {route} for group {group}",
            hint=f"wait until it has ended, or find it: fuser {self.path}",
        )
