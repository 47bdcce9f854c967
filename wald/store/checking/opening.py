"""What a segment itself tells of those before it, so that it can be checked before they are, or while they are.

A check may go by nothing but the segment, as if it were the first one. Its opening says afterwards whether what really
came before (a :class:`wald.format.state.LogState`) could have made it find something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from wald.format.batch import BatchHeader
from wald.format.state import LogState

NOTHING = LogState(next_sequence=0, append_time_ns=-(1 << 63))
"""What comes before the first segment."""


@dataclass(slots=True)
class Opening:
    """
    Attributes:
        time_ns: of its first batch; None if it has none.
        continues: for each route in it, the record that its first batch goes on with; 0 if it does not.
        lasts, open_records: what its control batches say, all of them; None: there is none.
        lost: whether records inside it are lost, and with them which of the open ones have ended.
    """

    time_ns: int | None = None
    continues: dict[str, int] = field(default_factory=dict)
    lasts: dict[str, int] | None = None
    open_records: dict[str, int] | None = None
    lost: bool = False

    def meet(self, header: BatchHeader, route: str) -> None:
        """Take in the next batch."""
        if self.time_ns is None:
            self.time_ns = header.append_time_ns
        if not header.is_control:
            self.continues.setdefault(route, header.continues_sequence)

    def meet_control(self, state: LogState) -> None:
        """Take in what the next control batch says; of several, what holds for each."""
        told, told_open = state.routes, state.open_records
        if self.lasts is not None:
            told = {route: min(last, told.get(route, 0)) for route, last in self.lasts.items()}
        if self.open_records is not None:
            told_open = {route: at for route, at in self.open_records.items() if told_open.get(route) == at}
        self.lasts, self.open_records = told, told_open

    def agrees(self, before: LogState) -> bool:
        """Whether a check against ``before`` finds just what one against :data:`NOTHING` does."""
        if self.time_ns is not None and self.time_ns < before.append_time_ns:
            return False
        if self.lost and before.open_records:
            return False
        for route, sequence in before.open_records.items():
            if self.continues.get(route, sequence) != sequence:
                return False
            if self.open_records is not None and self.open_records.get(route) != sequence:
                return False
        lasts = self.lasts
        return lasts is None or all(last <= lasts.get(route, 0) for route, last in before.routes.items())

    def going_on(self, before: LogState) -> dict[str, int]:
        """The records of ``before`` that do not end in the segment, because it has nothing of their routes."""
        return {route: at for route, at in before.open_records.items() if route not in self.continues}
