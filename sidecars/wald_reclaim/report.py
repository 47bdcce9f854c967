"""The lines of ``wald-reclaim``: one for each segment that is released, and one that sums up the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from wald.answers.fields import ledger_fields
from wald.cli.output import json_line
from wald.format.ledger_lines import parse_raw_json
from wald.setting_types import format_bytes
from wald_reclaim.decision import Decision
from wald_reclaim.excuses import Excuses
from wald_reclaim.policy import Verdict
from wald_reclaim.shrink import ShrunkSegment

_NAMED = 3  # routes in the summary; --json has all


@dataclass(slots=True)
class Report:
    """The report of one process, pass by pass.

    Args:
        intended: whether this is a dry run.
        watching: whether to leave out passes that do nothing, and problems that the previous pass reported.
        write: gets each line.
        warn: gets each trouble.
    """

    as_json: bool
    intended: bool
    watching: bool
    write: Callable[[str], None]
    warn: Callable[[str], None]
    _gone: int = 0
    _deleted: int = 0
    _shrunk: int = 0
    _gone_bytes: int = 0
    _kept: Counter[Verdict] = field(default_factory=Counter)
    _kept_bytes: int = 0
    _alone: Counter[str] = field(default_factory=Counter)
    """The bytes that one route alone pins."""
    _holding: dict[int, str] = field(default_factory=dict)
    """That route, of each segment that may be shrunk."""
    _lost: Counter[str] = field(default_factory=Counter)
    _warned: set[str] = field(default_factory=set)
    _warned_before: set[str] = field(default_factory=set)
    _excuses: Excuses = field(default_factory=Excuses)

    def begin(self) -> None:
        """Begin a pass, whether or not the previous one finished."""
        self._warned_before, self._warned = self._warned, set()

    def decision(self, decision: Decision) -> None:
        """Report the decision about one segment; a segment that stays is only counted."""
        if decision.message:
            self.trouble(decision.message)
        if not decision.verdict.goes:
            self._kept[decision.verdict] += 1
            self._kept_bytes += decision.stored_bytes
            if decision.alone and decision.pin is not None:
                self._alone[decision.pin.route] += decision.stored_bytes
                if decision.shrinkable:
                    self._holding[decision.segment.base_sequence] = decision.pin.route
            return
        self._gone += 1
        self._gone_bytes += decision.stored_bytes
        entry = decision.entry or {"base": decision.segment.base_sequence, "rule": decision.verdict.value}
        lost = entry.get("lost", {})
        self._lost.update(lost)
        if self.as_json:
            excuse = decision.excuse
            routes = {"routes": self._excuses.text(excuse.routes, excuse.claims, {})} if excuse is not None else {}
            self._object(
                "would-reclaim" if self.intended else "reclaimed", ledger_fields(parse_raw_json(entry | routes))
            )
            return
        records = f"records {entry['base']} to {entry['last']}" if "last" in entry else "decided before"
        unread = ", ".join(f"{count} unread of {route}" for route, count in lost.items())
        self.write(
            f"{'would reclaim' if self.intended else 'reclaimed'} {decision.segment.path.name}: {records}, "
            f"{format_bytes(decision.stored_bytes)}, rule {decision.verdict.value}"
            f"{', damaged' if entry.get('damaged') else ''}{unread and f'; LOST: {unread}'}"
        )

    def released(self, decision: Decision, *, due: bool) -> None:
        """Report a segment that was released earlier: deleted if ``due``, waiting, left alone, or taken back."""
        if decision.message:
            self.trouble(decision.message)
        if decision.verdict.goes:
            self._deleted += due
        if decision.verdict.goes or decision.stays:
            return
        if self.as_json:
            fields = {"segment": decision.segment.base_sequence, "reason": _key(decision.verdict)}
            self._object("would-take-back" if self.intended else "taken-back", fields)
        else:
            name = decision.segment.path.name
            self.write(f"{'would take' if self.intended else 'took'} {name} back: {decision.verdict.value}")

    def shrunk(self, shrunk: ShrunkSegment) -> None:
        """Report a segment that was shrunk; what it had before was counted as kept."""
        segment, records = shrunk.segment, shrunk.records
        self._shrunk += not shrunk.taken_back
        freed_bytes = shrunk.was_bytes - shrunk.bytes
        self._kept_bytes -= freed_bytes
        if (route := self._holding.get(segment.base_sequence)) is not None:
            self._alone[route] -= freed_bytes
        if self.as_json:
            sizes = {"bytes": shrunk.bytes, "was_bytes": shrunk.was_bytes}
            fields = {"segment": segment.base_sequence, **sizes, "records": None if self.intended else records}
            self._object("would-shrink" if self.intended else "shrunk", fields)
            return
        what = f"{format_bytes(shrunk.was_bytes)} to {format_bytes(shrunk.bytes)}"
        if self.intended:
            going = format_bytes(freed_bytes)
            self.write(f"would shrink {segment.path.name}: about {going} of {format_bytes(shrunk.was_bytes)} would go")
        elif shrunk.taken_back:
            self.write(f"did not shrink {segment.path.name}: a cursor was moved back meanwhile")
        else:
            self.write(f"shrunk {segment.path.name}: {what}, {records} records were read by every group")

    def end(self, troubles: Sequence[str]) -> None:
        """Report the end of a pass."""
        for message in troubles:
            self.trouble(f"{message}; no record counts as processed")
        if self.as_json:
            fields = {
                "dry_run": self.intended,
                "segments": self._gone,
                "bytes": self._gone_bytes,
                "deleted_segments": self._deleted,
                "shrunk_segments": self._shrunk,
                "kept_segments": {_key(verdict): count for verdict, count in self._kept.items()},
                "kept_bytes": self._kept_bytes,
                "pinned_alone": dict(self._alone),
                "lost": dict(self._lost),
            }
            self._object("pass", fields)
        elif self._gone or self._deleted or not self.watching:
            self.write(self._summary())
        self._gone = self._deleted = self._shrunk = self._gone_bytes = self._kept_bytes = 0
        self._kept.clear()
        self._alone.clear()
        self._holding.clear()
        self._lost.clear()

    def trouble(self, message: str) -> None:
        """Report a problem for the operator; while watching, once for as long as every pass finds it."""
        if message not in self._warned | self._warned_before:
            self.warn(message)
        if self.watching:
            self._warned.add(message)

    def _object(self, event: str, fields: Mapping[str, object]) -> None:
        self.write(json_line("reclaim", {"event": event} | {key: fields[key] for key in fields if key != "event"}))

    def _summary(self) -> str:
        marked, deleted = ("would be marked", "would be deleted") if self.intended else ("now marked", "deleted")
        kept = ", ".join(f"{count}: {verdict.value}" for verdict, count in self._kept.items())
        alone = ", ".join(f"{route} {format_bytes(size)}" for route, size in self._alone.most_common(_NAMED))
        return (
            f"segments {marked} for deletion: {self._gone} ({format_bytes(self._gone_bytes)}); {deleted}: "
            f"{self._deleted}; kept: {self._kept.total()} ({format_bytes(self._kept_bytes)}{kept and f'; {kept}'})"
            f"{alone and f'; pinned by one route alone: {alone}'}"
        )


def _key(verdict: Verdict) -> str:
    """A verdict as JSON has it: one word."""
    return verdict.name.lower()
