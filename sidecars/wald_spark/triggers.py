"""From trigger to trigger: where a stream begins, where the next trigger ends, and what has to be read for it.

A trigger covers, of each log, the records behind the last one up to the last of which all before are complete, or
less where the limits say so. What one trigger has covered, the next does not, and nothing lies between them.

Where the stream began in a log is decided at the trigger that meets the log first, and is part of its offsets. So it
is the same when Spark plans that trigger again after a crash, whatever has been appended or reclaimed meanwhile.
"""

from __future__ import annotations

from collections.abc import Mapping

from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.store.segments.head import lost_head
from wald_spark.admission import Backlog, admit
from wald_spark.blocks import Range
from wald_spark.offsets import Offsets, Position
from wald_spark.options import Limits, Options, StreamOptions
from wald_spark.pieces import LogPiece, pieces_of
from wald_spark.query import require_routes
from wald_spark.stream_logs import StreamLog, StreamLogs


class Triggers:
    """The triggers of one stream, in the one process that plans them.

    Attributes:
        latest: where the last trigger would have ended without a limit; None before the first.
    """

    def __init__(self, options: Options, stream: StreamOptions) -> None:
        self._options = options
        self._stream = stream
        self._watched = StreamLogs(options.paths, options.routes)
        self._last: dict[str, int] | None = None
        self._turn = 0
        self.latest: Offsets | None = None

    def start(self) -> Offsets:
        """Where a new stream stands: it has met no log yet."""
        return Offsets(routes=self._options.routes)

    def close(self) -> None:
        """Let nothing that comes from now on be part of the stream."""
        self._last = {log: watched.end for log, watched in self._poll().items()}

    def end(self, start: Offsets, limits: Limits) -> Offsets:
        """Where the trigger behind ``start`` ends; ``start`` itself, if nothing has come.

        Raises:
            NotFound: a log is gone, and loss is not tolerated; or a path, a route, a record to start with is not there.
            Damaged: a log ends in front of what was read of it.
            Refused: ``start`` is of a stream that reads other routes.
            InvalidInput, UnsupportedFormat: as :meth:`StreamLogs.poll`.
        """
        self._require_same_routes(start)
        watched = self._poll()
        positions = dict(start.logs)
        for log, position in start.logs.items():
            if log not in watched:
                self._vanished(log, position)
        if watched and not start.logs:
            self._require_known(watched)
            require_routes([seen.location for seen in watched.values()], self._options.routes or frozenset())
        backlogs = {}
        for log, seen in watched.items():
            end = seen.end if self._last is None else self._last.get(log)
            if end is None:
                continue
            position = positions.get(log) or self._begin(log, seen, end, new=not start.logs)
            positions[log] = position
            if seen.head is not None and position.last > seen.head.sequence:
                raise _rewound(seen, position.last)
            if position.last < end:
                assert seen.view is not None
                extents = seen.extents.between(seen.view, position.last, end)
                backlogs[log] = Backlog(position.last, end, extents)
        self.latest = _moved(positions, {log: backlog.end for log, backlog in backlogs.items()}, start.routes)
        ends = admit(list(backlogs.values()), limits, turn=self._turn)
        self._turn += 1
        return _moved(positions, dict(zip(backlogs, ends, strict=True)), start.routes)

    def pieces(self, start: Offsets, end: Offsets) -> list[LogPiece]:
        """What has to be read for the trigger from ``start`` to ``end``.

        Raises:
            NotFound: some of it is gone, and loss is not tolerated.
            Damaged: some of it cannot be read.
            Refused: it is of a stream that reads other routes.
            InvalidInput, UnsupportedFormat: as :meth:`StreamLogs.poll`.
        """
        self._require_same_routes(end)
        watched = self._poll()
        pieces: list[LogPiece] = []
        for log, position in end.logs.items():
            after = start.logs[log].last if log in start.logs else position.began
            if after < position.last:
                if log in watched:
                    pieces += self._log_pieces(watched[log], after + 1, position.last)
                else:
                    self._vanished(log, position)
        return pieces

    def _poll(self) -> Mapping[str, StreamLog]:
        return self._watched.poll(may_vanish=self._options.tolerance.loss)

    def _log_pieces(self, seen: StreamLog, first: int, last: int) -> list[LogPiece]:
        assert seen.view is not None
        known = seen.view.bound.sequence
        if last > (seen.end if known is None else known):
            raise _rewound(seen, last)
        return pieces_of(
            seen.view,
            Range(self._options.routes, first, last),
            limit_bytes=self._options.partition_bytes,
            tolerance=self._options.tolerance,
        )

    def _begin(self, log: str, seen: StreamLog, end: int, *, new: bool) -> Position:
        """Where the stream begins in a log that it meets; in one that has come later, with the oldest record."""
        began = seen.oldest - 1
        if new and self._stream.starting == "latest":
            began = end
        elif new and log in self._stream.first:
            began = self._stream.first[log] - 1
            if began > max(end, seen.head.sequence if seen.head else 0):
                raise NotFound(
                    f"{seen.location.root.path}: record {began + 1}, which startingOffsets names, was never issued",
                    hint='.option("startingOffsets", "latest") begins with the next one',
                )
        return Position(began, began)

    def _require_known(self, watched: Mapping[str, StreamLog]) -> None:
        if unknown := sorted(self._stream.first.keys() - watched.keys()):
            raise InvalidInput(
                f"startingOffsets names log {unknown[0]}, which is not there", hint=f"there are {', '.join(watched)}"
            )

    def _require_same_routes(self, offsets: Offsets) -> None:
        """Others have been passed over up to here, or would be missed."""
        if offsets.routes != self._options.routes:
            before, now = _words(offsets.routes), _words(self._options.routes)
            raise Refused(
                f"the checkpoint is that of a stream of {before}, and this one reads {now}",
                hint="a checkpointLocation of its own, with startingOffsets where the other one stands",
            )

    def _vanished(self, log: str, position: Position) -> None:
        if not self._options.tolerance.loss:
            raise NotFound(
                f"{', '.join(self._options.paths)}: log {log}, read up to record {position.last}, is not there",
                hint='bring it back; .option("failOnDataLoss", "false") goes on without it',
            )


def _moved(positions: Mapping[str, Position], ends: Mapping[str, int], routes: frozenset[str] | None) -> Offsets:
    return Offsets({log: at._replace(last=ends.get(log, at.last)) for log, at in positions.items()}, routes)


def _words(routes: frozenset[str] | None) -> str:
    return "all routes" if routes is None else f"routes {', '.join(sorted(routes))}"


def _rewound(seen: StreamLog, last: int) -> Damaged:
    """The error for a log that does not reach as far as a trigger did."""
    root = seen.location.root
    if seen.head is None and seen.view is not None and seen.view.bound.sequence is not None:
        return lost_head(root, seen.view.bound)
    return Damaged(
        f"{root.path}: log {seen.location.log} ends with record {seen.end}, and the stream has met record {last}: "
        "it is older than it was",
        hint="an older copy was put in its place; a stream of it needs a checkpointLocation of its own",
    )
