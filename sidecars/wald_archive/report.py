"""The lines of ``wald-archive``: the bundles of each run, and a line for each finding; and a progress bar."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from wald.answers.fields import time_fields
from wald.checking.checker import Level
from wald.cli.output import json_line
from wald.cli.progress import progress
from wald.setting_types import format_bytes
from wald_archive.bundle import Bundle
from wald_archive.into import Outcome
from wald_archive.ledger import Run
from wald_archive.pack import Packed, Request
from wald_archive.proof import Finding


class PackReport:
    """The report of one command, route by route, with a progress bar for each run.

    Args:
        write: gets each line.
        warn: gets what the operator should know besides.
    """

    def __init__(self, as_json: bool, *, write: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._write = write
        self._warn = warn
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
            self._write(json_line("archive.pack", {"runs": self._runs}))

    def begin(self, run: Run, resumed: bool) -> None:
        """Report a run that begins; an interrupted one has the options it was begun with."""
        if resumed:
            self._warn(f"going on with the interrupted run {run.bag}, with its own sizes and codec ({run.codec.value})")
        self._at = run.first - 1
        self._advance = self._bar.enter_context(progress(run.origin.route, run.last - self._at))

    def abandoned(self, run: Run) -> None:
        """Report an interrupted run that is given up."""
        reason = f"the cursor of {run.origin.group} was moved meanwhile"
        self._warn(f"the interrupted run {run.bag} is given up: {reason}; what it left at {run.dest} may be removed")

    def record(self, sequence: int) -> None:
        """Advance the bar to a sequence."""
        self._advance(sequence - self._at)
        self._at = sequence

    def route(self, request: Request, runs: Iterator[Packed]) -> None:
        """Report every run for one route when it is finished, or that there was nothing to archive."""
        done: Packed | None = None
        for done in runs:
            self._bar.close()
            if self._as_json:
                self._runs.append(_fields(done))
            else:
                self._write("\n".join(_lines(done)))
        if done is None and not self._as_json:
            upto = "" if request.to is None else f" up to record {request.to}"
            self._write(f"nothing to archive: group {request.group} has read all of {request.route}{upto}")


@dataclass(slots=True)
class ProofReport:
    """The report of one proof, finding by finding; ``write`` gets each line."""

    as_json: bool
    write: Callable[[str], None]
    counts: Counter[Level] = field(default_factory=Counter)

    def finding(self, found: Finding) -> None:
        """Report a finding; good files are only counted."""
        self.counts[found.level] += 1
        if self.as_json:
            fields = {
                "kind": "finding",
                "level": found.level.value,
                "dest": found.address,
                "bag": found.bag,
                "file": found.file,
                "offset": found.offset,
                "message": found.message,
            }
            self.write(json_line("archive.verify", fields))
        elif found.level is not Level.OK:
            at = "" if found.offset is None else f" offset {found.offset}:"
            self.write(f"{found.level.value:5}  {found.name}:{at} {found.message}")

    def end(self) -> None:
        """Report the counts."""
        good, errors, noted = self.counts[Level.OK], self.counts[Level.ERROR], self.counts[Level.INFO]
        if self.as_json:
            findings = {level.value: self.counts[level] for level in Level}
            self.write(json_line("archive.verify", {"kind": "summary", "good": not errors, "findings": findings}))
        else:
            verdict, plural = "damaged" if errors else "OK", "s" * (errors != 1)
            self.write(f"{verdict}: {_bundles(good)} proven, {noted} info, {errors} error{plural}")


def report_restored(outcome: Outcome, address: str, write: Callable[[str], None], *, as_json: bool) -> None:
    """Report a log that was made of an archive, and what an archive does not keep."""
    if as_json:
        write(json_line("archive.restore", _restored_fields(outcome, address)))
        return
    for route, count in sorted(outcome.records.items()):
        write(f"{route}: {count} records")
    write(f"log {outcome.log} at {outcome.root}: records {outcome.first} to {outcome.last} of log {outcome.from_log}")
    if outcome.missing:
        write(f"not restored: {outcome.missing} sequences, in {outcome.holes} runs, as no bundle holds them")
    write("not in an archive: the cursors of groups, who sent a record, and the numbers of producers' batches")


def _restored_fields(outcome: Outcome, address: str) -> dict[str, Any]:
    return {
        "root": str(outcome.root),
        "log": outcome.log,
        "dest": address,
        "from_log": outcome.from_log,
        "first": outcome.first,
        "last": outcome.last,
        "records": sum(outcome.records.values()),
        "routes": [{"route": route, "records": count} for route, count in sorted(outcome.records.items())],
        "missing": outcome.missing,
        "holes": outcome.holes,
    }


def _fields(done: Packed) -> dict[str, Any]:
    run, manifest = done.run, done.manifest
    return {
        "route": run.origin.route,
        "group": run.origin.group,
        "dest": run.dest,
        "bag": str(run.bag),
        "first": run.first,
        "last": run.last,
        "records": manifest.count if manifest else None,
        "resumed": done.resumed,
        "bundles": [_bundle_fields(entry.bundle) for entry in manifest.entries] if manifest else [],
    }


def _bundle_fields(bundle: Bundle) -> dict[str, Any]:
    contents = bundle.contents
    return {
        "bundle": bundle.name,
        "first": contents.first,
        "last": contents.last,
        "records": contents.count,
        "record_bytes": contents.record_bytes,
        "bytes": bundle.bytes,
        "sha256": bundle.sha256,
        **time_fields("earliest", contents.earliest_ns),
        **time_fields("latest", contents.latest_ns),
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
