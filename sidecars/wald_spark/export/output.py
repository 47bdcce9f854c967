"""The directory of an export: its files, and for each log a file that says how far it is exported.

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
from typing import Any

from wald.errors import Damaged, Refused
from wald.files.disk import Disk
from wald_spark.progress import Progress

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What files hold: the same for every run of a log and, but for the routes, for every log of an export.

    Attributes:
        routes: None: all.
        names: of fields of JSON whose types are inferred; none if the types were given.
        json: the columns parsed from values, as DDL; "": none, and the values are exported as they are.
    """

    routes: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    json: str = ""

    def as_options(self) -> str:
        """As options of the command."""
        words = [] if self.routes is None else [f"--route {route}" for route in self.routes]
        if self.names:
            words.append(f"--columns {','.join(self.names)}")
        elif self.json:
            words.append(f"--json-schema '{self.json}'")
        return " ".join(words) or "neither --route nor --columns nor --json-schema"


@dataclass(frozen=True, slots=True)
class ExportedFile:
    """A file of an export.

    Attributes:
        name: below the directory of the export.
        corrupt: how many of its records are not JSON of these columns.
    """

    name: str
    records: int
    bytes: int
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class ExportedLog:
    """How far one log is exported.

    Attributes:
        last: records up to this sequence are exported, except those of the routes in ``held_back``.
        held_back: of each route whose newest record had no end yet, the last record that is exported.
        epoch, life: the daemon's start during the last run, as in :class:`Progress`.
        records, corrupt, files, bytes: of all runs together.
        passed_over: how often something could not be read, and was passed over.
        at: when the last run ended.
        staging: directory of the files, ``pending``, that are still to be moved; "": none.
    """

    log: str
    shape: Shape
    first: int
    last: int
    held_back: Mapping[str, int] = field(default_factory=dict)
    records: int = 0
    corrupt: int = 0
    files: int = 0
    bytes: int = 0
    passed_over: int = 0
    at: str = ""
    staging: str = ""
    pending: tuple[str, ...] = ()
    epoch: int = 0
    life: str = ""

    @property
    def progress(self) -> Progress:
        return Progress(self.last, self.held_back, self.epoch, self.life)

    def with_files(
        self, new: list[ExportedFile], *, progress: Progress, staging: str, passed_over: int, at: str
    ) -> ExportedLog:
        """The same after one more run."""
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


class Catalog:
    """The file of each log below ``OUT/_wald``."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk

    def entries(self) -> dict[str, ExportedLog]:
        """How far each log is exported, by id.

        Raises:
            Damaged: a file is not as it was written.
        """
        return {path.stem: self._read(path) for path in sorted(self._directory.glob("*.json"))}

    def write(self, exported: ExportedLog) -> None:
        """Replace the file of a log; it is on disk when this returns."""
        content = {"format": FORMAT} | asdict(exported)
        self._disk.replace(self._path(exported.log), json.dumps(content, indent=1).encode() + b"\n")

    def _path(self, log: str) -> Path:
        return self._directory / f"{log}.json"

    def _read(self, path: Path) -> ExportedLog:
        try:
            content = json.loads(path.read_bytes())
            if content.pop("format") != FORMAT:
                raise Refused(f"{path}: made by another wald", hint="install a newer wald: docs/install.md")
            return _exported(content)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path}: not written by an export ({error})",
                hint=f"put it back from a backup, or remove it and all files of {path.stem} to export that log again",
            ) from error


def _exported(content: dict[str, Any]) -> ExportedLog:
    shape = content.pop("shape")
    routes = shape["routes"]
    return ExportedLog(
        shape=Shape(None if routes is None else tuple(routes), tuple(shape["names"]), shape["json"]),
        pending=tuple(content.pop("pending")),
        **content,
    )


class Output:
    """The directory ``out``, which this process has locked."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._out = out
        self._disk = disk
        self._stagings = out / "_staging"
        self.catalog = Catalog(private(out), disk)

    def recover(self) -> list[ExportedLog]:
        """Move the files of a run that was interrupted while it moved them, and remove those of any other.

        Returns:
            How far the logs of the moved files are exported.

        Raises:
            Damaged: a file that was to be moved is neither at its old name nor at its new one.
        """
        finished = [entry for entry in self.catalog.entries().values() if entry.pending]
        for entry in finished:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)
        for leftover in private(self._out).glob("*.tmp"):
            self._disk.unlink(leftover)
        return finished

    def stage(self) -> Path:
        """A new directory for files that are being made."""
        staging = self._stagings / uuid.uuid4().hex
        staging.mkdir(parents=True)
        return staging

    def commit(self, entries: Sequence[ExportedLog], staging: Path) -> None:
        """List the staged files in the files of their logs, and move them to their names.

        A crash leaves each log as it was or as it is to be, once :meth:`recover` has been called.
        """
        for directory in (staging, self._stagings, self._out):
            self._disk.sync_directory(directory)
        for entry in entries:
            self.catalog.write(entry)
        for entry in entries:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)

    def refuse_strays(self, log: str) -> None:
        """Refuse files of a log that has no file in the catalog.

        Raises:
            Refused: there are such files, so it is not known which records they hold.
        """
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
        self.catalog.write(replace(entry, staging="", pending=()))


def private(out: Path) -> Path:
    """Where an export keeps files that are not for readers."""
    return out / "_wald"


def staged_name(name: str) -> str:
    """The name of the file ``name`` while it is staged: it has no directories, and matches no pattern of readers."""
    return name.replace("/", ",") + ".staged"
