"""What ``wald-reclaim`` says: a line for each segment that goes, and what became of the rest in one."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import click

from wald.setting_types import format_bytes
from wald_reclaim.plan import Decision
from wald_reclaim.policy import Verdict


@dataclass(slots=True)
class Report:
    """Of one process, look by look.

    Args:
        intended: whether nothing is done, only told.
        watching: whether a look that finds nothing to do is not worth a line, and what was said before is not either.
    """

    as_json: bool
    intended: bool
    watching: bool
    _gone: int = 0
    _deleted: int = 0
    _gone_bytes: int = 0
    _kept: Counter[Verdict] = field(default_factory=Counter)
    _kept_bytes: int = 0
    _lost: Counter[str] = field(default_factory=Counter)
    _said: set[str] = field(default_factory=set)

    def decision(self, decision: Decision) -> None:
        """One segment; only those that go are worth a line of their own."""
        if decision.message:
            self.trouble(decision.message)
        if not decision.verdict.goes:
            self._kept[decision.verdict] += 1
            self._kept_bytes += decision.stored_bytes
            return
        self._gone += 1
        self._gone_bytes += decision.stored_bytes
        entry = decision.entry or {"base": decision.segment.base_sequence, "rule": decision.verdict.value}
        lost = entry.get("lost", {})
        self._lost.update(lost)
        if self.as_json:
            click.echo(json.dumps(entry | {"event": "would-reclaim" if self.intended else "reclaimed"}))
            return
        records = f"records {entry['base']} to {entry['last']}" if "last" in entry else "decided before"
        words = ", ".join(f"{count} unread of {route}" for route, count in lost.items())
        click.echo(
            f"{'would reclaim' if self.intended else 'reclaimed'} {decision.segment.path.name}: {records}, "
            f"{format_bytes(decision.stored_bytes)}, rule {decision.verdict.value}"
            f"{', damaged' if entry.get('damaged') else ''}{words and f'; LOST: {words}'}"
        )

    def released(self, decision: Decision, *, due: bool) -> None:
        """One segment that was reclaimed before: it is deleted if ``due``, waits, or comes back."""
        if decision.message:
            self.trouble(decision.message)
        if decision.verdict.goes:
            self._deleted += due
            return
        if self.as_json:
            told = {"base": decision.segment.base_sequence, "why": decision.verdict.value}
            click.echo(json.dumps({"event": "would-take-back" if self.intended else "taken-back"} | told))
        else:
            name = decision.segment.path.name
            click.echo(f"{'would take' if self.intended else 'took'} {name} back: {decision.verdict.value}")

    def end(self, troubles: Sequence[str]) -> None:
        """The end of a look."""
        for message in troubles:
            self.trouble(f"{message}; it counts as nothing processed")
        if self.as_json:
            told = {
                "event": "look",
                "reclaimed": self._gone,
                "bytes": self._gone_bytes,
                "unlinked": self._deleted,
                "kept": {verdict.value: count for verdict, count in self._kept.items()},
                "kept_bytes": self._kept_bytes,
                "lost": dict(self._lost),
                "dry_run": self.intended,
            }
            click.echo(json.dumps(told))
        elif self._gone or self._deleted or not self.watching:
            click.echo(self._summary())
        self._gone = self._deleted = self._gone_bytes = self._kept_bytes = 0
        self._kept.clear()
        self._lost.clear()

    def trouble(self, message: str) -> None:
        """Something that somebody has to look at, on stderr; while watching once."""
        if message not in self._said:
            click.echo(f"wald-reclaim: {message}", err=True)
            if self.watching:
                self._said.add(message)

    def _summary(self) -> str:
        done = "would be reclaimed" if self.intended else "reclaimed"
        deleted = "would be deleted" if self.intended else "deleted"
        segments = f"{self._gone} segment{'' if self._gone == 1 else 's'}"
        words = [
            f"{segments} {done}, {format_bytes(self._gone_bytes)}",
            f"{self._deleted} of those released {deleted}",
        ]
        kept = ", ".join(f"{count} because {verdict.value}" for verdict, count in self._kept.items())
        words.append(f"{self._kept.total()} kept, {format_bytes(self._kept_bytes)}{kept and f': {kept}'}")
        return "; ".join(words)
