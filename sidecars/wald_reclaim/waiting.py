"""Which complete raw segments the sealer has left for so long that they may be deleted as they are."""

from __future__ import annotations

from collections.abc import Callable

from wald.files.listing import Listing
from wald.format.names import Kind
from wald.segments.durable_end import Bound

_RAW_SECONDS = 5.0  # a cut segment that the sealer has not taken for so long may be deleted raw


class WaitingRaw:
    """The raw segments of a log, as one process has seen them; the first look takes all of them for old."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since: dict[int, float] | None = None

    def left(self, bound: Bound, listing: Listing) -> set[int]:
        """The complete raw segments that the sealer has not taken for a while.

        The segment of the head is not among them: a starting daemon reads it to learn which bytes of its pipes are in
        the log, and moves the head only then.
        """
        raw = [segment.base_sequence for segment in listing.segments[:-1] if segment.kind is Kind.RAW]
        cut = [base for base in raw if base < bound.segment]
        now = self._clock()
        before = dict.fromkeys(cut, now - _RAW_SECONDS) if self._since is None else self._since
        self._since = {base: before.get(base, now) for base in cut}
        return {base for base, since in self._since.items() if now - since >= _RAW_SECONDS}
