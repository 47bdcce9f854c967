"""Model of a work group by ``docs/work.md``: a plain list of records.

If the page does not specify an outcome, the model permits both and adopts the observed one: delivery of a record that
was due before the clock was set back, detection of an expired lease before another call, and the last deliveries that
survive a crash of the machine.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field


@dataclass
class Item:
    """A record.

    Attributes:
        batch_end: the last sequence that was appended with it.
        due_ns: not before this wall-clock time; 0: immediately.
        peak_ns: the latest wall-clock time since the due time is known.
        tries: number of deliveries; low: the minimum that a new owner knows.
        holder: the worker that has it, from since_ns until until_ns.
        lapsed: True if the lease has or may have expired.
        doubtful: True if a crash may have undone its delivery.
    """

    sequence: int
    batch_end: int
    key: bytes | None
    due_ns: int
    peak_ns: int
    tries: int = 0
    low: int = 0
    holder: str = ""
    since_ns: int = 0
    until_ns: int = 0
    lapsed: bool = False
    doubtful: bool = False
    done: bool = False
    reason: str = ""


@dataclass
class Group:
    """All records of the route."""

    by_key: bool
    window: int
    max_tries: int | None
    items: dict[int, Item] = field(default_factory=dict)
    unsettled: set[bytes] = field(default_factory=set)
    """Keys of which a record was given up, which may not be done yet."""

    def open(self) -> list[Item]:
        return [item for item in self.items.values() if not item.done]

    @property
    def floor(self) -> int:
        """The last sequence up to which all records of this route are done."""
        return min((item.sequence for item in self.open()), default=1 << 62) - 1

    def held(self, worker: str) -> list[Item]:
        return [item for item in self.open() if item.holder == worker]

    def is_given_up(self, item: Item) -> bool:
        """True if it may be given up by now."""
        return self.max_tries is not None and item.tries >= self.max_tries and (not item.holder or item.lapsed)

    def behind(self, item: Item, beside: Iterable[int] = ()) -> bool:
        """True if an earlier record of its key is open outside the same lease."""
        if not self.by_key or item.key is None:
            return False
        earlier = (each for each in self.open() if each.key == item.key and each.sequence < item.sequence)
        return any(each.sequence not in beside for each in earlier)

    def may_come(self, item: Item, beside: Iterable[int], floor: int) -> bool:
        """True if it may be delivered."""
        given_up = self.max_tries is not None and item.low >= self.max_tries
        return (
            not (item.done or item.holder or given_up)
            and item.peak_ns >= item.due_ns
            and not self.behind(item, beside)
            and item.sequence - floor <= self.window
        )

    def must_come(self, item: Item, floor: int, wall_ns: int) -> bool:
        """True if it must be delivered before all later records, or together with an earlier one of its key."""
        return (
            self.may_come(item, (), floor)
            and not self.is_given_up(item)
            and item.due_ns <= wall_ns
            and item.batch_end - floor <= self.window
            and (not self.by_key or item.key not in self.unsettled)
        )

    def next(self, wall_ns: int) -> Item | None:
        """Return the first record that must be delivered now."""
        floor = self.floor
        return next((item for item in self.open() if self.must_come(item, floor, wall_ns)), None)

    def lapse(self, now_ns: int) -> None:
        """Expire leases; a record returns together with later ones of its key."""
        for item in self.open():
            if item.holder and item.until_ns <= now_ns:
                self.come_back(item, lapsed=True)

    def notice(self) -> None:
        """End the leases that have certainly expired."""
        for item in self.open():
            if item.lapsed:
                item.holder, item.lapsed = "", False

    def come_back(self, item: Item, *, lapsed: bool = False) -> None:
        """Release a record from its worker, certainly or possibly."""
        for each in self.open():
            follows = self.by_key and item.key is not None and each.key == item.key and each.sequence > item.sequence
            if each is item or (follows and each.holder):
                each.lapsed = lapsed
                each.holder = each.holder if lapsed else ""

    def show(self, wall_ns: int) -> None:
        """Record that the wall clock has shown this time."""
        for item in self.open():
            item.peak_ns = max(item.peak_ns, wall_ns)

    def crash(self, *, cut: bool) -> None:
        """End the owner; with ``cut`` also lose its unsynced changes."""
        for item in self.open():
            item.holder, item.lapsed = "", False
            if cut:
                item.doubtful = item.doubtful or item.tries > 0
                item.reason = ""  # it may be lost: only a reason with a delay was synced
                item.low = min(item.low, max(0, item.tries - 1))
