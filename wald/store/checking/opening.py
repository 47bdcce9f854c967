"""What a segment says of the segments before it, so that it can be checked before they are.

Such a check is made as if the segment were the first one. The opening of the segment then says whether a check against
the state at the end of the segments before it (a :class:`wald.format.state.LogState`) has the same findings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from wald.format.batch import BatchHeader
from wald.format.state import LogState, still_open

NOTHING = LogState(next_sequence=0, append_time_ns=-(1 << 63))
"""The state before the first segment."""


@dataclass(slots=True)
class Opening:
    """
    Attributes:
        time_ns: of its first batch; None if it has none.
        continues: for each route in it, the record that its first batch goes on with; 0 if it does not.
        lasts, open_records: what all its control batches say; None if there is none.
        dropped: the last sequence that relief has dropped of each route in it; open records up to that may have ended.
        lost: whether records in it are lost, or dropped of unknown routes. Then it is not known which open records
            ended.
    """

    time_ns: int | None = None
    continues: dict[str, int] = field(default_factory=dict)
    lasts: dict[str, int] | None = None
    open_records: dict[str, int] | None = None
    dropped: Mapping[str, int] = field(default_factory=dict)
    lost: bool = False

    def add(self, header: BatchHeader, route: str, dropped: Mapping[str, int] | None) -> None:
        """Add the next batch; ``dropped`` is as of :func:`wald.format.state.still_open`."""
        if self.time_ns is None:
            self.time_ns = header.append_time_ns
        if header.is_dropped and dropped is None:
            self.lost = True
        elif header.is_dropped and not self.dropped:
            self.dropped = {route: last for route, last in (dropped or {}).items() if route not in self.continues}
        if not header.is_control:
            self.continues.setdefault(route, header.continues_sequence)

    def add_control(self, state: LogState) -> None:
        """Add the next control batch. Of several, only what all of them say is kept."""
        lasts, begun = state.routes, state.open_records
        if self.lasts is not None:
            lasts = {route: min(last, lasts.get(route, 0)) for route, last in self.lasts.items()}
        if self.open_records is not None:
            begun = {route: at for route, at in self.open_records.items() if begun.get(route) == at}
        self.lasts, self.open_records = lasts, begun

    def agrees(self, before: LogState) -> bool:
        """Whether a check against ``before`` has the same findings as one against :data:`NOTHING`."""
        if self.time_ns is not None and self.time_ns < before.append_time_ns:
            return False
        if self.lost and before.open_records:
            return False
        for route, sequence in before.open_records.items():
            if self.open_records is not None and self.open_records.get(route) != sequence:
                return False
        for route, sequence in still_open(before.open_records, self.dropped).items():
            if self.continues.get(route, sequence) != sequence:
                return False
        lasts = self.lasts
        return lasts is None or all(last <= lasts.get(route, 0) for route, last in before.routes.items())

    def going_on(self, before: LogState) -> dict[str, int]:
        """The open records of ``before`` that do not end in the segment: it had no batch of their routes."""
        begun = still_open(before.open_records, self.dropped)
        return {route: at for route, at in begun.items() if route not in self.continues}
