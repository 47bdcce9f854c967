"""Generations: each run writes a directory of its own, and a link names the current one."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from wald.errors import Damaged, Refused
from wald.files.disk import Disk
from wald_spark.progress import Progress

FORMAT = 1
_LINK, _STATE = "latest", "_wald.json"
_NAME = re.compile(r"gen-(\d{6,})")


@dataclass(frozen=True, slots=True)
class Generation:
    """What a generation holds.

    Attributes:
        routes: None: all.
        logs: how far each log was read for it.
        keys, deleted: its rows, and those of them whose value is null.
        records, unkeyed: records read by all runs together, and those of them without a key, which are in no row.
        passed_over: how often something could not be read, and was passed over.
        at: when it was made.
    """

    routes: tuple[str, ...] | None
    logs: dict[str, Progress]
    keys: int = 0
    deleted: int = 0
    records: int = 0
    unkeyed: int = 0
    passed_over: int = 0
    at: str = ""


class Generations:
    """The directory ``out``, which this process has locked."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._out = out
        self._disk = disk

    @property
    def partial(self) -> Path:
        """The directory of files that executors hand to Spark."""
        return self._out / "_partial"

    def latest(self) -> Path | None:
        """The current generation's directory; None before the first run has ended."""
        try:
            return self._out / os.readlink(self._out / _LINK)
        except FileNotFoundError:
            return None

    def read(self) -> Generation | None:
        """What the current generation holds.

        Raises:
            Damaged: its description is missing or damaged.
        """
        latest = self.latest()
        if latest is None:
            return None
        path = latest / _STATE
        try:
            content = json.loads(path.read_bytes())
            if content.pop("format") != FORMAT:
                raise Refused(f"{path}: made by another wald", hint="install a newer wald: docs/install.md")
            routes = content.pop("routes")
            logs = {log: Progress(**reached) for log, reached in content.pop("logs").items()}
            return Generation(None if routes is None else tuple(routes), logs, **content)
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            raise Damaged(
                f"{path}: not written by a compaction ({error})",
                hint="another --out starts from scratch",
            ) from error

    def begin(self) -> Path:
        """Remove what interrupted runs have left; returns the directory of the next generation."""
        number = self._sweep()
        self.partial.mkdir()
        return self._out / f"gen-{number + 1:06d}"

    def commit(self, directory: Path, generation: Generation) -> None:
        """Sync ``directory`` with all its files, and make it the current generation."""
        for path in directory.iterdir():
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self._disk.sync(descriptor)
            finally:
                os.close(descriptor)
        content = {"format": FORMAT} | asdict(generation)
        self._disk.replace(directory / _STATE, json.dumps(content, indent=1).encode() + b"\n")
        self._disk.sync_directory(self._out)
        temporary = self._out / f"{_LINK}.tmp"
        os.symlink(directory.name, temporary)
        self._disk.rename(temporary, self._out / _LINK)
        self._disk.sync_directory(self._out)
        self._sweep()

    def _sweep(self) -> int:
        """Remove all but the current generation and the one before it; returns the number of the current one."""
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
        raise Damaged(f"{directory}: not a generation of wald-compact", hint=f"mv {directory} to another place")
    return int(match[1])
