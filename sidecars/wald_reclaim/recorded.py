"""The segments that are reclaimed by the ledger and still exist: by which rule, what was lost, and since when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from wald.files.listing import Segment
from wald.files.uptime import Moment, parse_moment
from wald.format.ledger_lines import Entry, parse_raw_json
from wald.format.names import Kind
from wald_reclaim.policy import Verdict

_RULES = {verdict.value: verdict for verdict in Verdict if verdict.expires}


@dataclass(frozen=True, slots=True)
class Recorded:
    """What the line of a segment says; without its routes, of which there may be a thousand.

    Attributes:
        verdict: by which it goes; READ, too, for a rule that this version does not know.
        lost: for each route the unread records that go with it.
        rules: of the routes in ``lost``, if routes go by different ones.
        since: when the line was written; None if it does not say.
        form: in which the segment is deleted, RAW or SEALED.
    """

    verdict: Verdict
    lost: Mapping[str, int]
    rules: Mapping[str, Verdict]
    since: Moment | None
    form: Kind

    @classmethod
    def of(cls, entry: Entry) -> Recorded:
        """What a line ``reclaimed`` says."""
        lost = entry.get("lost", {})
        verdict = _RULES.get(str(entry.get("rule")), Verdict.READ)
        rules = {}
        if verdict is Verdict.EACH_ROUTE:
            routes = (each for each in parse_raw_json(entry)["routes"] if each["route"] in lost)
            rules = {each["route"]: _RULES.get(str(each.get("rule")), Verdict.READ) for each in routes}
        return cls(verdict, lost, rules, parse_moment(entry), Kind.RAW if entry.get("form") == "raw" else Kind.SEALED)


@dataclass(frozen=True, slots=True)
class OnRecord:
    """By the first sequence of each segment."""

    _found: dict[int, Recorded] = field(default_factory=dict)

    def take_in(self, entry: Entry) -> None:
        """Take in a line of the ledger."""
        base = entry.get("base")
        if not isinstance(base, int):
            return
        if entry.get("event") == "reclaimed":
            self._found[base] = Recorded.of(entry)
        elif entry.get("event") != "evidence":
            self._found.pop(base, None)

    def forget(self, base: int) -> None:
        """Take in that the file is deleted."""
        self._found.pop(base, None)

    def get(self, base: int) -> Recorded | None:
        """What the ledger says of a segment; None if it is not reclaimed."""
        return self._found.get(base)

    def due(self, released: Iterable[Segment], now: Moment, *, grace_ns: int) -> list[Segment]:
        """Those whose grace period is over: counted from their line, or ended by a new boot, which ends all readers."""
        due = []
        for segment in released:
            recorded = self.get(segment.base_sequence)
            since = recorded.since if recorded is not None else None
            over = grace_ns == 0 or (
                since is not None and (now.boot != since.boot or now.boottime_ns - since.boottime_ns >= grace_ns)
            )
            if over or segment.kind is segment.kind.deleting:
                due.append(segment)
        return due
