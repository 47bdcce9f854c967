"""Generations: what each run has made stands in a directory of its own, and a link says which one holds."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from wald.errors import Damaged, Refused
from wald.store.files.disk import Disk
from wald_spark.progress import Reached

FORMAT = 1
_LINK, _STATE = "latest", "_wald.json"
_NAME = re.compile(r"gen-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Generation:
    """What a directory holds.

    Attributes:
        routes: None: all.
        logs: how far each log is in it.
        keys, deleted: rows; those of them whose value is null.
        records, unkeyed: of all runs together; those without a key are in no row.
        passed_over: how often something could not be read, and was not to be.
        at: when it was made.
    """

    routes: tuple[str, ...] | None
    logs: dict[str, Reached]
    keys: int = 0
    deleted: int = 0
    records: int = 0
    unkeyed: int = 0
    passed_over: int = 0
    at: str = ""


class Generations:
    """The directory ``out``, which is the caller's alone."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._out = out
        self._disk = disk

    @property
    def partial(self) -> Path:
        """For what is passed between the parts of a run."""
        return self._out / "_partial"

    def latest(self) -> Path | None:
        """The directory that holds; None before the first run has ended."""
        try:
            return self._out / os.readlink(self._out / _LINK)
        except FileNotFoundError:
            return None

    def read(self) -> Generation | None:
        """What is in it.

        Raises:
            Damaged: that is not told there.
        """
        latest = self.latest()
        if latest is None:
            return None
        path = latest / _STATE
        try:
            told = json.loads(path.read_bytes())
            if told.pop("format") != FORMAT:
                raise Refused(f"{path}: made by another wald", hint="pip install --upgrade wald")
            routes = told.pop("routes")
            logs = {log: Reached(**reached) for log, reached in told.pop("logs").items()}
            return Generation(None if routes is None else tuple(routes), logs, **told)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path}: not what a compaction has written ({error})",
                hint="another --out begins anew",
            ) from error

    def begin(self) -> Path:
        """A name for the next one; what dead runs have left is removed."""
        number = self._sweep()
        self.partial.mkdir()
        return self._out / f"gen-{number + 1:06d}"

    def commit(self, directory: Path, generation: Generation) -> None:
        """Make ``directory`` the one that holds, with all that is in it on disk."""
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._disk.sync(descriptor)
            finally:
                os.close(descriptor)
        told = {"format": FORMAT} | asdict(generation)
        self._disk.replace(directory / _STATE, json.dumps(told, indent=1).encode() + b"\n")
        self._disk.sync_directory(self._out)
        temporary = self._out / f"{_LINK}.tmp"
        os.symlink(directory.name, temporary)
        self._disk.rename(temporary, self._out / _LINK)
        self._disk.sync_directory(self._out)
        self._sweep()

    def _sweep(self) -> int:
        """Remove all but the generation that holds and the one before it; gives the number of the former."""
        latest = self.latest()
        number = _number(latest) if latest else 0
        for path in self._out.glob("gen-*"):
            if not number - 1 <= _number(path) <= number:
                shutil.rmtree(path)
        shutil.rmtree(self.partial, ignore_errors=True)
        (self._out / f"{_LINK}.tmp").unlink(missing_ok=True)
        return number


def _number(directory: Path) -> int:
    match = _NAME.fullmatch(directory.name)
    if match is None:
        raise Damaged(f"{directory}: no generation of wald-compact", hint=f"mv {directory} to another place")
    return int(match[1])
