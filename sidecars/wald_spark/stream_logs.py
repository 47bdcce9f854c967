"""The logs that a stream reads: found by their paths, and polled for how far they go.

A poll of a log that has not moved reads its head; of shipped segments it lists their directory. The paths are searched
again every few seconds, as a pattern may match more logs by then. What a pattern matches and is not a log, or not yet,
is ignored.
"""

from __future__ import annotations

import glob
import os
import time
from collections.abc import Mapping, Sequence

from wald.errors import Damaged, InvalidInput, NotFound, Replaced, RolledBack
from wald.files.identity import read_identity
from wald.format.head import Head
from wald.segments.continuity import Continuity, LastSeen
from wald.segments.durable_end import read_head
from wald.segments.view import View
from wald_spark.admission import Extents
from wald_spark.locations import Location, LogLocation, Shipped, find_locations, is_pattern, is_remote, local_path
from wald_spark.log_end import LogEndTracker
from wald_spark.offsets import Position

SEARCH_SECONDS = 5.0
_HINT = "a stream of this copy needs another checkpointLocation"


class StreamLog:
    """One log, as it was at the last poll.

    Attributes:
        head: None if it is lost, or the segments are shipped ones.
        view: None before the first poll.
        end: the last sequence up to which every record of the routes is complete.
    """

    def __init__(self, location: LogLocation, routes: frozenset[str] | None) -> None:
        self.location = location
        self.extents = Extents(routes)
        self.head: Head | None = None
        self.view: View | None = None
        self.end = 0
        self._end_tracker = LogEndTracker(routes)
        self._continuity = Continuity(location.root, location.log_id, hint=_HINT)
        self._verified: Position | None = None

    @property
    def oldest(self) -> int:
        """The first record that there is; if there is none, the next one."""
        segments = self.view.segments if self.view else ()
        return segments[0].base_sequence if segments else self.end + 1

    def poll(self) -> None:
        """Find how far the log goes by now.

        Raises:
            NotFound: it is gone, or there is another log under its path.
            RolledBack: an older copy of it is there.
            Damaged, UnsupportedFormat: it cannot be read.
        """
        head = self._read_head()
        if head is not None:
            self._require_continuity(head)
        if head is not None and head == self.head:
            return
        self._require_same_log()
        view = self.location.view()
        if self.view is None or (view.bound, view.listing) != (self.view.bound, self.view.listing):
            self.end = self._end_tracker.end(view).complete
        self.head, self.view = head, view

    def require_past(self, position: Position) -> None:
        """Check that the polled log is the one in which ``position`` was reached.

        Raises:
            RolledBack: it is an older copy.
        """
        if self.head is not None and position != self._verified:
            seen = LastSeen(position.last, position.epoch, position.life)
            Continuity(self.location.root, self.location.log_id, seen, hint=_HINT).check(self.head)
            self._verified = position

    def at(self, position: Position, last: int) -> Position:
        """Return ``position`` moved to ``last``, with the start of the daemon that the last poll has met."""
        seen = self._continuity.last_seen
        return Position(position.began, last, seen.epoch, seen.life) if seen else Position(position.began, last)

    def _require_continuity(self, head: Head) -> None:
        try:
            self._continuity.check(head)
        except RolledBack:
            raise
        except Replaced:
            self._require_same_log()

    def _read_head(self) -> Head | None:
        if isinstance(self.location.root, Shipped):
            return None
        try:
            return read_head(self.location.root)
        except Damaged:  # derived, and written again at the next commit
            return None

    def _require_same_log(self) -> None:
        root = self.location.root
        if isinstance(root, Shipped):
            if not root.path.is_dir():
                raise NotFound(f"{root.path}: log {self.location.log} is no longer there", hint=f"ls {root.path}")
        elif read_identity(root).log_id != self.location.log_id:
            raise NotFound(f"{root.path}: log {self.location.log} is no longer there", hint=f"cat {root.identity}")


class StreamLogs:
    """The logs that ``paths`` name, by id.

    Args:
        search_seconds: how often the paths are searched.
    """

    def __init__(
        self, paths: Sequence[str], routes: frozenset[str] | None, *, search_seconds: float = SEARCH_SECONDS
    ) -> None:
        self._paths = [path if is_remote(path) else local_path(path, hint="") for path in paths]
        self._patterns = {path for path in self._paths if is_pattern(path)}
        self._routes = routes
        self._search_seconds = search_seconds
        self._logs: dict[str, StreamLog] = {}
        self._next_search: float | None = None

    def poll(self, *, may_vanish: bool) -> Mapping[str, StreamLog]:
        """The logs as they are now, by id.

        Args:
            may_vanish: whether a log that is gone is left out instead of an error.

        Raises:
            NotFound: a path holds no log, or no longer the one it held; or nothing matches.
            InvalidInput: a path holds what cannot be streamed, or two hold the same log.
            Damaged, UnsupportedFormat: a log cannot be read.
        """
        if self._next_search is None or time.monotonic() >= self._next_search:
            self._search()
        for log_id, log in list(self._logs.items()):
            try:
                log.poll()
            except NotFound:
                if not may_vanish:
                    raise
                del self._logs[log_id]
                self._next_search = 0.0
        return self._logs

    def _search(self) -> None:
        found = {}
        for location in self._locations(first=self._next_search is None):
            if not isinstance(location, LogLocation):
                raise _not_streamable(location.address)
            known = self._logs.get(location.log)
            found[location.log] = known if known and known.location == location else StreamLog(location, self._routes)
        self._logs = found
        self._next_search = time.monotonic() + self._search_seconds

    def _locations(self, *, first: bool) -> Sequence[Location]:
        """The logs that there are now; at the first search, each path that is not a pattern has to be one."""
        names: list[str] = []
        if remote := next(filter(is_remote, self._paths), None):
            raise _not_streamable(remote)
        for path in self._paths:
            if path in self._patterns:
                names += filter(_holds_log, sorted(glob.glob(os.path.abspath(path))))
            elif first or _holds_log(path):
                names.append(path)
        if first and not names:
            raise NotFound(f"{', '.join(self._paths)}: no log there", hint=f"ls -d {' '.join(self._paths)}")
        return find_locations(names, patterns=False) if names else []


def _not_streamable(address: str) -> InvalidInput:
    return InvalidInput(f"{address}: an archive cannot be streamed", hint='spark.read.format("wald") reads it')


def _holds_log(name: str) -> bool:
    """Whether there is something to stream; a log that is being made has no identity yet."""
    try:
        return any(isinstance(location, LogLocation) for location in find_locations([name], patterns=False))
    except NotFound:
        return False
