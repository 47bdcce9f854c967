"""Directory of an export: its files, and for each log a file with its position.

Files are staged, listed in the file of their log, and moved to their names, in steps that the next run can finish or
undo.
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from wald.errors import Damaged, Refused
from wald.files.disk import Disk
from wald_spark.progress import Progress

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """Contents of files: the same for every run of a log and, except for the routes, for every log of an export."""

    routes: tuple[str, ...] | None = None  # None for all
    names: tuple[str, ...] = ()  # fields of JSON whose types are inferred; empty if the types were given
    json: str = ""  # the columns parsed from values, as DDL; "" to export the values unchanged

    def as_options(self) -> str:
        words = [] if self.routes is None else [f"--route {route}" for route in self.routes]
        if self.names:
            words.append(f"--columns {','.join(self.names)}")
        elif self.json:
            words.append(f"--json-schema '{self.json}'")
        return " ".join(words) or "neither --route nor --columns nor --json-schema"


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """File of an export."""

    name: str  # below the directory of the export
    records: int
    bytes: int
    corrupt: int = 0  # number of its records that are not JSON of these columns


@dataclass(frozen=True, slots=True)
class ExportedLog:
    """Progress of the export of one log, with sums over all runs."""

    log: str
    shape: Shape
    first: int
    last: int  # all records up to this one are exported, except those of routes in ``held_back``
    held_back: Mapping[str, int] = field(default_factory=dict)  # the last exported record of each route
    records: int = 0
    corrupt: int = 0
    files: int = 0
    bytes: int = 0
    passed_over: int = 0  # reports about unreadable records
    at: str = ""  # time at which the last run ended
    staging: str = ""  # directory of ``pending`` files, which are still to be moved
    pending: tuple[str, ...] = ()
    epoch: int = 0
    life: str = ""

    @property
    def progress(self) -> Progress:
        return Progress(self.last, self.held_back, self.epoch, self.life)

    def with_files(
        self, new: list[ExportedFile], *, progress: Progress, staging: str, passed_over: int, at: str
    ) -> ExportedLog:
        return replace(
            self,
            last=progress.last,
            held_back=progress.held_back,
            epoch=progress.epoch,
            life=progress.life,
            records=self.records + sum(file.records for file in new),
            corrupt=self.corrupt + sum(file.corrupt for file in new),
            files=self.files + len(new),
            bytes=self.bytes + sum(file.bytes for file in new),
            passed_over=self.passed_over + passed_over,
            at=at,
            staging=staging if new else "",
            pending=tuple(file.name for file in new),
        )


class Output:
    """Directory ``out``, which this process has locked, with a file for each log below ``OUT/_wald``."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._out = out
        self._disk = disk
        self._stagings = out / "_staging"

    def entries(self) -> dict[str, ExportedLog]:
        return {path.stem: _read(path) for path in sorted(private(self._out).glob("*.json"))}

    def write(self, exported: ExportedLog) -> None:
        content = {"format": FORMAT} | asdict(exported)
        path = private(self._out) / f"{exported.log}.json"
        self._disk.replace(path, json.dumps(content, indent=1).encode() + b"\n")

    def recover(self) -> list[ExportedLog]:
        """Move the files of a run that was interrupted while it moved them, and remove those of any other."""
        finished = [entry for entry in self.entries().values() if entry.pending]
        for entry in finished:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)
        for leftover in private(self._out).glob("*.tmp"):
            self._disk.unlink(leftover)
        return finished

    def stage(self) -> Path:
        """Create a directory for new files."""
        staging = self._stagings / uuid.uuid4().hex
        staging.mkdir(parents=True)
        return staging

    def commit(self, entries: Sequence[ExportedLog], staging: Path) -> None:
        """List the staged files in the files of their logs, and move them to their names.

        A crash leaves each log either unchanged or complete, once :meth:`recover` has been called.
        """
        for directory in (staging, self._stagings, self._out):
            self._disk.sync_directory(directory)
        for entry in entries:
            self.write(entry)
        for entry in entries:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)

    def refuse_strays(self, log: str) -> None:
        """Refuse files of a log that has no file in the catalog."""
        stray = next(self._out.glob(f"route=*/date=*/{log}-*.parquet"), None)
        if stray is not None:
            raise Refused(
                f"{stray}: {private(self._out)} does not list this log, so its records would be exported twice",
                hint=f"remove {self._out}/route=*/date=*/{log}-*.parquet, or choose another --out",
            )

    def _move(self, entry: ExportedLog) -> None:
        staging = self._stagings / entry.staging
        made: set[Path] = {self._out}
        for name in entry.pending:
            output = self._out / name
            made |= {output.parent, output.parent.parent}
            output.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._disk.rename(staging / staged_name(name), output)
            except FileNotFoundError:
                if not output.exists():
                    raise Damaged(
                        f"{output}: was to be moved here from {staging}, but is in neither place",
                        hint=f"remove {private(self._out)}/{entry.log}.json and all files of this log to redo it",
                    ) from None
        for directory in sorted(made, reverse=True):
            self._disk.sync_directory(directory)
        self.write(replace(entry, staging="", pending=()))


def _read(path: Path) -> ExportedLog:
    try:
        content = json.loads(path.read_bytes())
        if content.pop("format") != FORMAT:
            raise Refused(f"{path}: made by another wald", hint="install a newer wald: docs/install.md")
        shape, pending = content.pop("shape"), tuple(content.pop("pending"))
        routes = None if shape["routes"] is None else tuple(shape["routes"])
        return ExportedLog(shape=Shape(routes, tuple(shape["names"]), shape["json"]), pending=pending, **content)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise Damaged(
            f"{path}: not written by an export ({error})",
            hint=f"restore it from a backup, or remove it and all files of {path.stem} to export that log again",
        ) from error


def private(out: Path) -> Path:
    """Return the directory for files that are not for readers."""
    return out / "_wald"


def staged_name(name: str) -> str:
    """Return the name of a staged file: it has no directories, and matches no pattern of readers."""
    return name.replace("/", ",") + ".staged"
