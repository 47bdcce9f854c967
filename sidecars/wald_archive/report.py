"""What ``wald-archive`` says: of each run its bundles, of each finding a line; and a bar while people wait."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

import click

from wald.cli.progress import progress
from wald.setting_types import format_bytes
from wald.store.checking.finding import Level
from wald_archive.ledger import Run
from wald_archive.pack import Packed, Request
from wald_archive.proof import Finding


class PackReport:
    """Of one command, route by route; a bar for each run."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._runs: list[dict[str, Any]] = []  # Any: it is JSON
        self._bar = ExitStack()
        self._advance: Callable[[int], None] = lambda _: None
        self._at = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.close()
        if self._as_json and error is None:
            click.echo(json.dumps({"runs": self._runs}))

    def begin(self, run: Run, resumed: bool) -> None:
        """A run that is about to be carried out; one that was interrupted is not quite what was asked for now."""
        if resumed:
            words = f"going on with the interrupted run {run.bag}, with its own sizes and codec ({run.codec.value})"
            click.echo(f"wald-archive: {words}", err=True)
        self._at = run.first - 1
        self._advance = self._bar.enter_context(progress(run.origin.route, run.last - self._at))

    def abandoned(self, run: Run) -> None:
        """An interrupted run that is given up."""
        words = f"the interrupted run {run.bag} is given up: the cursor of {run.origin.group} was moved meanwhile"
        click.echo(f"wald-archive: {words}; what it left at {run.dest} may be removed", err=True)

    def record(self, sequence: int) -> None:
        """How far the run has got."""
        self._advance(sequence - self._at)
        self._at = sequence

    def route(self, request: Request, runs: Iterator[Packed]) -> None:
        """Every run for one route, as it is finished; without one the group has processed everything."""
        done: Packed | None = None
        for done in runs:
            self._bar.close()
            if self._as_json:
                self._runs.append(_told(done))
            else:
                click.echo("\n".join(_lines(done)))
        if done is None and not self._as_json:
            click.echo(
                f"nothing to archive: the log holds no record of {request.route} that group {request.group} has not "
                "processed"
            )


@dataclass(slots=True)
class ProofReport:
    """Of one proof, finding by finding."""

    as_json: bool
    counts: Counter[Level] = field(default_factory=Counter)

    def finding(self, found: Finding) -> None:
        """What is good is only counted."""
        self.counts[found.level] += 1
        if self.as_json:
            told = {"level": found.level.value, "dest": found.place, "bag": found.bag, "file": found.file}
            click.echo(json.dumps(told | {"offset": found.offset, "message": found.message}))
        elif found.level is not Level.OK:
            at = "" if found.offset is None else f" offset {found.offset}:"
            click.echo(f"{found.level.value:5}  {found.name}:{at} {found.message}")

    def end(self) -> None:
        if not self.as_json:
            good, errors, noted = self.counts[Level.OK], self.counts[Level.ERROR], self.counts[Level.INFO]
            judged = "damaged" if errors else "good"
            click.echo(f"{judged}: {_bundles(good)} proven, {noted} info, {errors} error")


def _told(done: Packed) -> dict[str, Any]:
    run, manifest = done.run, done.manifest
    return {
        "route": run.origin.route,
        "group": run.origin.group,
        "dest": run.dest,
        "bag": str(run.bag),
        "first": run.first,
        "last": run.last,
        "count": manifest.count if manifest else None,
        "resumed": done.resumed,
        "bundles": [entry.told() for entry in manifest.entries] if manifest else [],
    }


def _lines(done: Packed) -> Iterator[str]:
    run, manifest = done.run, done.manifest
    if manifest is None:
        yield f"bag {run.bag}: was complete, and is acknowledged now"
        return
    for entry in manifest.entries:
        bundle = entry.bundle
        contents = bundle.contents
        yield (
            f"{bundle.name}: {contents.count} records, {contents.first} to {contents.last}, "
            f"{format_bytes(contents.record_bytes)} in {format_bytes(bundle.bytes)}, sha256 {bundle.sha256}"
        )
    yield f"bag {run.bag}: {manifest.count} records in {_bundles(len(manifest.entries))} at {run.dest}"


def _bundles(count: int) -> str:
    return "1 bundle" if count == 1 else f"{count} bundles"
