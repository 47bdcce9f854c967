"""What ``wald-export`` says: a line for each log, what was passed over, and how fast it went; and a bar meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click

from wald.cli.progress import progress
from wald.kinds import bytes_in_words
from wald_spark.commands import Held
from wald_spark.export.book import Exported
from wald_spark.export.job import Done


@dataclass(slots=True)
class Report:
    """Of one run into ``out``."""

    out: Path
    as_json: bool
    held: Held = field(default_factory=Held)
    _began: float = field(default_factory=time.monotonic)
    _bar: ExitStack = field(default_factory=ExitStack)
    _advance: Callable[[int], None] = field(default=lambda _: None)

    def finished(self, entries: Sequence[Exported]) -> None:
        """What an interrupted run had left to be moved."""
        for entry in entries:
            words = f"moved what an interrupted run had left: {_files(len(entry.pending))} of log {entry.log}"
            click.echo(f"wald-export: {words}", err=True)

    def shape(self, ddl: str) -> None:
        """The types that were found out."""
        click.echo(f"wald-export: as --json-schema '{ddl}'", err=True)

    def begin(self, raw_bytes: int) -> None:
        self._advance = self._bar.enter_context(progress("export", raw_bytes))

    def advance(self, raw_bytes: int) -> None:
        self._advance(raw_bytes)

    def close(self) -> None:
        """No bar any more."""
        self._bar.close()

    def done(self, logs: Sequence[Done], notes: Path) -> None:
        seconds = time.monotonic() - self._began
        if self.as_json:
            told = {
                "out": str(self.out),
                "logs": [_told(each) for each in logs],
                "held": self.held.routes,
                "seconds": round(seconds, 3),
            }
            click.echo(json.dumps(told))
            return
        for each in logs:
            click.echo(_line(each))
        if not logs:
            click.echo("nothing to export: every complete record is exported")
        for line in self.held.lines():
            click.echo(line)
        if passed_over := [message for each in logs for message in each.passed_over]:
            click.echo(f"passed over {len(passed_over)} times, told in {notes}: {passed_over[0]}")
        if raw := sum(each.due.portion.raw_bytes for each in logs):
            click.echo(f"{bytes_in_words(raw)} of records in {seconds:.1f} s with Spark's start, to {self.out}")


def _line(done: Done) -> str:
    entry, before = done.entry, done.due.before
    corrupt = entry.corrupt - before.corrupt
    return (
        f"{done.due.portion.place.root.path}: up to record {entry.last}: {entry.records - before.records} records"
        f"{f' ({corrupt} of them corrupt)' if corrupt else ''} in {_files(len(done.made))}, "
        f"{bytes_in_words(entry.bytes - before.bytes)}"
    )


def _files(count: int) -> str:
    return "1 file" if count == 1 else f"{count} files"


def _told(done: Done) -> dict[str, Any]:  # Any: it is JSON
    entry, before = done.entry, done.due.before
    return {
        "log": entry.log,
        "root": str(done.due.portion.place.root.path),
        "first": before.last + 1,
        "last": entry.last,
        "records": entry.records - before.records,
        "corrupt": entry.corrupt - before.corrupt,
        "passed_over": done.passed_over,
        "raw_bytes": done.due.portion.raw_bytes,
        "bytes": entry.bytes - before.bytes,
        "files": [file.name for file in done.made],
    }
