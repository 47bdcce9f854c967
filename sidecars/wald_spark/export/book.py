"""What an export remembers of each log: up to where it is exported, how, and which files are still to be moved."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from wald.errors import Damaged, Refused
from wald.store.files.disk import Disk
from wald_spark.progress import Reached

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Shape:
    """What files hold; the same for every run of a log, and all but the routes for every log of an export.

    Attributes:
        routes: None: all.
        names: of fields of JSON, whose types were found out; none if somebody has said them.
        json: the columns parsed from values, as DDL; "": none, and the values are there as they are.
    """

    routes: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()
    json: str = ""

    def in_words(self) -> str:
        """As the options of the command."""
        words = [] if self.routes is None else [f"--route {route}" for route in self.routes]
        if self.names:
            words.append(f"--columns {','.join(self.names)}")
        elif self.json:
            words.append(f"--json-schema '{self.json}'")
        return " ".join(words) or "neither --route nor --columns nor --json-schema"


@dataclass(frozen=True, slots=True)
class Made:
    """A file of an export.

    Attributes:
        name: below the directory of the export.
        corrupt: how many of its records are no JSON that fits.
    """

    name: str
    records: int
    bytes: int
    corrupt: int = 0


@dataclass(frozen=True, slots=True)
class Exported:
    """How far one log is exported.

    Attributes:
        last: records up to this sequence are, but for those of the routes in ``held``.
        held: of each route whose newest record had no end yet, the last one that is exported.
        records, corrupt, files, bytes: of all runs together.
        passed_over: how often something could not be read, and was not to be.
        at: when the last run ended.
        staging: name of the run whose files, ``pending``, are still to be moved; "": none are.
    """

    log: str
    shape: Shape
    first: int
    last: int
    held: Mapping[str, int] = field(default_factory=dict)
    records: int = 0
    corrupt: int = 0
    files: int = 0
    bytes: int = 0
    passed_over: int = 0
    at: str = ""
    staging: str = ""
    pending: tuple[str, ...] = ()

    @property
    def reached(self) -> Reached:
        return Reached(self.last, self.held)

    def with_files(self, made: list[Made], *, reached: Reached, staging: str, passed_over: int, at: str) -> Exported:
        """The same after one more run."""
        return replace(
            self,
            last=reached.last,
            held=reached.held,
            records=self.records + sum(file.records for file in made),
            corrupt=self.corrupt + sum(file.corrupt for file in made),
            files=self.files + len(made),
            bytes=self.bytes + sum(file.bytes for file in made),
            passed_over=self.passed_over + passed_over,
            at=at,
            staging=staging if made else "",
            pending=tuple(file.name for file in made),
        )


class Book:
    """The file of each log below ``OUT/_wald``."""

    def __init__(self, directory: Path, disk: Disk) -> None:
        self._directory = directory
        self._disk = disk

    def entries(self) -> dict[str, Exported]:
        """All that is known, by log.

        Raises:
            Damaged: a file is not what was written.
        """
        return {path.stem: self._read(path) for path in sorted(self._directory.glob("*.json"))}

    def enter(self, exported: Exported) -> None:
        """Replace what is known of a log; on disk when this returns."""
        told = {"format": FORMAT} | asdict(exported)
        self._disk.replace(self._path(exported.log), json.dumps(told, indent=1).encode() + b"\n")

    def _path(self, log: str) -> Path:
        return self._directory / f"{log}.json"

    def _read(self, path: Path) -> Exported:
        try:
            told = json.loads(path.read_bytes())
            if told.pop("format") != FORMAT:
                raise Refused(f"{path}: made by another wald", hint="pip install --upgrade wald")
            return _exported(told)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path}: not what an export has written ({error})",
                hint=f"put it back from a backup, or remove it and all files of {path.stem} to export that log anew",
            ) from error


def _exported(told: dict[str, Any]) -> Exported:
    shape = told.pop("shape")
    routes = shape["routes"]
    return Exported(
        shape=Shape(None if routes is None else tuple(routes), tuple(shape["names"]), shape["json"]),
        pending=tuple(told.pop("pending")),
        **told,
    )
