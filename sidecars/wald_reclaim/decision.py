"""What is decided about one segment."""

from __future__ import annotations

from dataclasses import dataclass

from wald.files.listing import Segment
from wald.format.ledger_lines import Entry
from wald.retention.blockers import Pin
from wald_reclaim.excuses import Excuse
from wald_reclaim.policy import Verdict


@dataclass(frozen=True, slots=True)
class Decision:
    """The decision about one complete segment.

    Attributes:
        pin: one of the cursors that hold it back. alone: whether no other route does.
        entry: the line to write into the ledger first; None: none, or it was written before.
        withdrawal: the line before that, which takes back an earlier one; None: there is none to take back.
        shrinkable: whether it is sealed, and would be deleted if its unread records were not in it.
        excuse: what the line leaves to one that it shares with others, if it does.
        stays: whether the file keeps its present name, because it is another segment or its new name is taken.
        message: what is wrong with the segment; "" if nothing is known to be.
    """

    segment: Segment
    verdict: Verdict
    stored_bytes: int
    pin: Pin | None = None
    entry: Entry | None = None
    message: str = ""
    withdrawal: Entry | None = None
    alone: bool = False
    shrinkable: bool = False
    excuse: Excuse | None = None
    stays: bool = False
