"""The logs that a stream reads: found, found anew where a pattern may match more, and looked at for how far they go.

A log that has not moved costs one read of its head, and shipped segments a listing of their directory. The paths are
looked at again every few seconds; what a pattern matches and is no log, or none yet, is passed over.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping, Sequence

from wald.errors import Damaged, InvalidInput, NotFound
from wald.format.head import Head
from wald.store.files.directory import Listing, read_identity
from wald.store.segments.head import Bound, read_head
from wald_spark.admission import Extents
from wald_spark.locations import Location, LogLocation, Shipped, find_locations, is_remote, local_path
from wald_spark.log_end import LogEndTracker

LOOK_SECONDS = 5.0


class StreamLog:
    """One log, and what was seen of it last.

    Attributes:
        head: None where there is none: it is lost, or the segments are shipped ones.
        bound, listing: as :meth:`LogLocation.look` gave them.
        end: the last sequence up to which every record of the routes is complete.
    """

    def __init__(self, location: LogLocation, routes: frozenset[str] | None) -> None:
        self.location = location
        self.extents = Extents(location, routes)
        self.head: Head | None = None
        self.bound: Bound | None = None
        self.listing = Listing(())
        self.end = 0
        self._ends = LogEndTracker(location, routes)

    @property
    def oldest(self) -> int:
        """The first record that there is; the next one, if there is none."""
        segments = self.listing.segments
        return segments[0].base_sequence if segments else self.end + 1

    def poll(self) -> None:
        """See how far the log goes by now.

        Raises:
            NotFound: it is gone, or another one is in its place.
            Damaged, UnsupportedFormat: it cannot be told.
        """
        head = self._read_head()
        if head is not None and head == self.head:
            return
        self._require()
        bound, listing = self.location.look()
        if (bound, listing) != (self.bound, self.listing):
            self.end = self._ends.end(bound, listing).complete
        self.head, self.bound, self.listing = head, bound, listing

    def _read_head(self) -> Head | None:
        if isinstance(self.location.root, Shipped):
            return None
        try:
            return read_head(self.location.root)
        except Damaged:  # derived, and made anew at the next commit
            return None

    def _require(self) -> None:
        root = self.location.root
        if isinstance(root, Shipped):
            if not root.path.is_dir():
                raise NotFound(f"{root.path}: log {self.location.log} is not there any more", hint=f"ls {root.path}")
        elif read_identity(root).log_id != self.location.log_id:
            raise NotFound(f"{root.path}: log {self.location.log} is not there any more", hint=f"cat {root.identity}")


class StreamLogs:
    """All that ``paths`` name, by id.

    Args:
        look_seconds: how often the paths are looked at again.
    """

    def __init__(
        self, paths: Sequence[str], routes: frozenset[str] | None, *, look_seconds: float = LOOK_SECONDS
    ) -> None:
        self._paths = [path if is_remote(path) else local_path(path, hint="") for path in paths]
        self._routes = routes
        self._look_seconds = look_seconds
        self._logs: dict[str, StreamLog] = {}
        self._next_look: float | None = None

    def poll(self, *, may_vanish: bool) -> Mapping[str, StreamLog]:
        """Each as it is now.

        Args:
            may_vanish: whether a log that is gone is left out, and no error.

        Raises:
            NotFound: a path holds no log, or no longer the one it held; or nothing matches.
            InvalidInput: a path holds what cannot be streamed, or two hold the same log.
            Damaged, UnsupportedFormat: what is there cannot be told.
        """
        if self._next_look is None or time.monotonic() >= self._next_look:
            self._look()
        for log, watched in list(self._logs.items()):
            try:
                watched.poll()
            except NotFound:
                if not may_vanish:
                    raise
                del self._logs[log]
                self._next_look = 0.0
        return self._logs

    def _look(self) -> None:
        found = {}
        for location in self._locations(first=self._next_look is None):
            if not isinstance(location, LogLocation):
                raise _archive(location.address)
            known = self._logs.get(location.log)
            found[location.log] = known if known and known.location == location else StreamLog(location, self._routes)
        self._logs = found
        self._next_look = time.monotonic() + self._look_seconds

    def _locations(self, *, first: bool) -> Sequence[Location]:
        """Where there are logs now; when asked first, each path by itself has to be one."""
        names = []
        if remote := next(filter(is_remote, self._paths), None):
            raise _archive(remote)
        for path in self._paths:
            if first and not glob.has_magic(path):
                names.append(path)
            else:
                names += [
                    name for name in map(glob.escape, sorted(glob.glob(os.path.abspath(path)))) if _is_place(name)
                ]
        if first and not names:
            raise NotFound(f"{', '.join(self._paths)}: no log there", hint=f"ls -d {' '.join(self._paths)}")
        return find_locations(names) if names else []


def _archive(location: str) -> InvalidInput:
    return InvalidInput(f"{location}: an archive cannot be streamed", hint='spark.read.format("wald") reads it')


def _is_place(name: str) -> bool:
    """Whether there is something to stream; a log that is just being made has no identity yet."""
    try:
        return any(isinstance(location, LogLocation) for location in find_locations([name]))
    except NotFound:
        return False
