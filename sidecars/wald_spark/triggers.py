"""The triggers of a stream: where the stream begins, where the next trigger ends, and what has to be read for it.

A trigger covers the records of each log from the end of the last trigger to the last sequence up to which all records
are complete, or less if the limits say so. So triggers neither overlap nor leave anything out between them.

The first trigger that meets a log decides where the stream begins in it, and this is part of the offsets. So it is the
same when Spark plans that trigger again after a crash, even if records were appended or reclaimed meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from wald.errors import Damaged, InvalidInput, NotFound, Refused
from wald.segments.durable_end import lost_head
from wald_spark.admission import Backlog, admit
from wald_spark.blocks import Range
from wald_spark.offsets import Offsets, Position
from wald_spark.options import Limits, Options, StreamOptions
from wald_spark.pieces import LogPiece, first_record, pieces_of
from wald_spark.query import require_routes
from wald_spark.stream_logs import StreamLog, StreamLogs


class Triggers:
    """Plans the triggers of one stream.

    Attributes:
        latest: where the last trigger would have ended without a limit; None before the first.
    """

    def __init__(self, options: Options, stream: StreamOptions) -> None:
        self._options = options
        self._stream = stream
        self._logs = StreamLogs(options.paths, options.routes)
        self._last: dict[str, int] | None = None
        self._turn = 0
        self.latest: Offsets | None = None

    def start(self) -> Offsets:
        """Where a new stream stands: it has met no log yet."""
        return Offsets(routes=self._options.routes)

    def close(self) -> None:
        """Let the stream end with the records that are there now."""
        self._last = {log: found.end for log, found in self._poll().items()}

    def end(self, start: Offsets, limits: Limits) -> Offsets:
        """Where the trigger behind ``start`` ends; ``start`` itself, if nothing has come.

        Raises:
            NotFound: a log is gone, and loss is not tolerated; or a path, a route or a first record does not exist.
            RolledBack: a log is an older copy of the one that was read.
            Damaged: a log cannot be read.
            Refused: ``start`` is of a stream that reads other routes.
            InvalidInput, UnsupportedFormat: as :meth:`StreamLogs.poll`.
        """
        self._require_same_routes(start)
        logs = self._poll()
        for log, position in start.logs.items():
            if log not in logs:
                self._require_loss_tolerated(log, position)
        if logs and not start.logs:
            self._require_known(logs)
            require_routes([found.location for found in logs.values()], self._options.routes or frozenset())
        positions = dict(start.logs)
        backlogs = dict(self._backlogs(logs, positions, new=not start.logs))
        latest = {log: backlog.end for log, backlog in backlogs.items()}
        self.latest = _moved(logs, positions, latest, start.routes)
        ends = admit(list(backlogs.values()), limits, turn=self._turn)
        self._turn += 1
        return _moved(logs, positions, dict(zip(backlogs, ends, strict=True)), start.routes)

    def _backlogs(
        self, logs: Mapping[str, StreamLog], positions: dict[str, Position], *, new: bool
    ) -> Iterator[tuple[str, Backlog]]:
        """The logs in which something has come; one that is met for the first time gets its position."""
        for log, found in logs.items():
            end = found.end if self._last is None else self._last.get(log)
            if end is None:
                continue
            position = positions[log] = positions.get(log) or self._begin(log, found, end, new=new)
            found.require_past(position)
            if position.last < end:
                assert found.view is not None
                yield log, Backlog(position.last, end, found.extents.between(found.view, position.last, end))

    def pieces(self, start: Offsets, end: Offsets) -> list[LogPiece]:
        """What has to be read for the trigger from ``start`` to ``end``.

        Raises:
            NotFound: some of it is gone, and loss is not tolerated.
            Damaged: some of it cannot be read.
            RolledBack: a log is an older copy of the one that was read.
            Refused: it is of a stream that reads other routes.
            InvalidInput, UnsupportedFormat: as :meth:`StreamLogs.poll`.
        """
        self._require_same_routes(end)
        logs = self._poll()
        pieces: list[LogPiece] = []
        for log, position in end.logs.items():
            after = start.logs[log].last if log in start.logs else position.began
            if after < position.last:
                if log in logs:
                    logs[log].require_past(position)
                    pieces += self._log_pieces(logs[log], after + 1, position.last)
                else:
                    self._require_loss_tolerated(log, position)
        return pieces

    def _poll(self) -> Mapping[str, StreamLog]:
        return self._logs.poll(may_vanish=self._options.tolerance.loss)

    def _log_pieces(self, found: StreamLog, first: int, last: int) -> list[LogPiece]:
        assert found.view is not None
        known = found.view.bound.sequence
        if last > (found.end if known is None else known):
            raise _rewound(found, last)
        return pieces_of(
            found.view,
            Range(self._options.routes, first, last),
            limit_bytes=self._options.partition_bytes,
            tolerance=self._options.tolerance,
        )

    def _begin(self, log: str, found: StreamLog, end: int, *, new: bool) -> Position:
        """Return the position at which the stream begins in a log: in a new one, the oldest record.

        Raises:
            Damaged: earlier records are missing, and that is not tolerated.
        """
        assert found.view is not None
        if new and self._stream.starting == "latest":
            began = end
        elif new and log in self._stream.first:
            began = self._stream.first[log] - 1
            if began > max(end, found.head.sequence if found.head else 0):
                raise NotFound(
                    f"{found.location.root.path}: record {began + 1}, which startingOffsets names, was never issued",
                    hint='.option("startingOffsets", "latest") begins with the next one',
                )
        else:
            began = first_record(found.view, partial=self._options.tolerance.partial) - 1
            if began + 1 < found.oldest:  # reported before Spark keeps an offset
                self._log_pieces(found, began + 1, found.oldest - 1)
        return found.at(Position(began, began), began)

    def _require_known(self, logs: Mapping[str, StreamLog]) -> None:
        if unknown := sorted(self._stream.first.keys() - logs.keys()):
            raise InvalidInput(
                f"startingOffsets names log {unknown[0]}, which is missing", hint=f"there are {', '.join(logs)}"
            )

    def _require_same_routes(self, offsets: Offsets) -> None:
        """Records of other routes were skipped up to here, or would be missed from here on."""
        if offsets.routes != self._options.routes:
            before, now = _named(offsets.routes), _named(self._options.routes)
            raise Refused(
                f"the checkpoint is that of a stream of {before}, and this one reads {now}",
                hint="use a separate checkpointLocation, with startingOffsets at the other one's position",
            )

    def _require_loss_tolerated(self, log: str, position: Position) -> None:
        if not self._options.tolerance.loss:
            raise NotFound(
                f"{', '.join(self._options.paths)}: log {log}, read up to record {position.last}, is missing",
                hint='restore it; .option("failOnDataLoss", "false") continues without it',
            )


def _moved(
    logs: Mapping[str, StreamLog],
    positions: Mapping[str, Position],
    ends: Mapping[str, int],
    routes: frozenset[str] | None,
) -> Offsets:
    """Return the positions moved to ``ends``; one that does not move stays equal, even if the daemon was restarted."""
    moved = {log: logs[log].at(positions[log], end) for log, end in ends.items() if end != positions[log].last}
    return Offsets({**positions, **moved}, routes)


def _named(routes: frozenset[str] | None) -> str:
    return "all routes" if routes is None else f"routes {', '.join(sorted(routes))}"


def _rewound(found: StreamLog, last: int) -> Damaged:
    """Return the error for a log without a head that ends before the last record of a trigger."""
    root = found.location.root
    if found.view is not None and found.view.bound.sequence is not None:
        return lost_head(root, found.view.bound)
    return Damaged(
        f"{root.path}: log {found.location.log} ends with record {found.end}, and the stream has met record {last}: "
        "its newest segments are missing",
        hint=f"ls {root.segments}; copy the segments again",
    )
