"""What ``wald-compact`` says: what was read, and what there is now; and a bar meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path

import click

from wald.cli.progress import progress
from wald.kinds import bytes_in_words
from wald_spark.commands import Held
from wald_spark.compact.job import Done


@dataclass(slots=True)
class Report:
    """Of one run."""

    as_json: bool
    held: Held = field(default_factory=Held)
    _began: float = field(default_factory=time.monotonic)
    _bar: ExitStack = field(default_factory=ExitStack)
    _advance: Callable[[int], None] = field(default=lambda _: None)

    def begin(self, raw_bytes: int) -> None:
        self._advance = self._bar.enter_context(progress("compact", raw_bytes))

    def advance(self, raw_bytes: int) -> None:
        self._advance(raw_bytes)

    def close(self) -> None:
        """No bar any more."""
        self._bar.close()

    def done(self, done: Done, notes: Path) -> None:
        seconds = time.monotonic() - self._began
        raw = sum(portion.raw_bytes for portion in done.portions)
        if self.as_json:
            told = {
                "directory": str(done.directory) if done.directory else None,
                "read": asdict(done.counts) | {"raw_bytes": raw},
                "generation": asdict(done.generation) if done.generation else None,
                "held": self.held.routes,
                "passed_over": done.passed_over,
                "seconds": round(seconds, 3),
            }
            click.echo(json.dumps(told))
            return
        if not done.portions:
            click.echo("nothing to compact: every complete record is in what there is")
        for line in self.held.lines():
            click.echo(line)
        if done.generation is not None:
            made, counts = done.generation, done.counts
            click.echo(f"{counts.records} records, {counts.unkeyed} of them without a key and left out")
            click.echo(f"{made.keys} keys, {made.deleted} of them deleted, in {done.directory}")
        if done.passed_over:
            click.echo(f"passed over {len(done.passed_over)} times, told in {notes}: {done.passed_over[0]}")
        if raw:
            click.echo(f"{bytes_in_words(raw)} of records in {seconds:.1f} s with Spark's start")
