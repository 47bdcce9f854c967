"""The directory of an export: files are staged, told of, and moved, in steps that the next run can finish or undo."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from wald.errors import Damaged, Refused
from wald.store.files.disk import Disk
from wald_spark.export.book import Book, Exported


class Target:
    """The directory ``out``, which is the caller's alone."""

    def __init__(self, out: Path, disk: Disk) -> None:
        self._out = out
        self._disk = disk
        self._stagings = out / "_staging"
        self.book = Book(private(out), disk)

    def recover(self) -> list[Exported]:
        """Finish what a run has begun to move, and remove what another has left; gives the logs that were finished.

        Raises:
            Damaged: a file that was to be moved is neither here nor there.
        """
        finished = [entry for entry in self.book.entries().values() if entry.pending]
        for entry in finished:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)
        for rubbish in private(self._out).glob("*.tmp"):
            self._disk.unlink(rubbish)
        return finished

    def stage(self) -> Path:
        """A new directory for files that are being made."""
        staging = self._stagings / uuid.uuid4().hex
        staging.mkdir(parents=True)
        return staging

    def commit(self, entries: Sequence[Exported], staging: Path) -> None:
        """Tell of the staged files, and move them to their places.

        A crash leaves each log as it was or as it is to be, once :meth:`recover` has been called.
        """
        for directory in (staging, self._stagings, self._out):
            self._disk.sync_directory(directory)
        for entry in entries:
            self.book.enter(entry)
        for entry in entries:
            self._move(entry)
        shutil.rmtree(self._stagings, ignore_errors=True)

    def refuse_strays(self, log: str) -> None:
        """Make sure that there are no files of a log of which nothing is told.

        Raises:
            Refused: there are, and nobody can tell what is in them.
        """
        stray = next(self._out.glob(f"route=*/date=*/{log}-*.parquet"), None)
        if stray is not None:
            raise Refused(
                f"{stray}: {private(self._out)} does not tell of this log, so its records would be there twice",
                hint=f"remove {self._out}/route=*/date=*/{log}-*.parquet, or choose another --out",
            )

    def _move(self, entry: Exported) -> None:
        staging = self._stagings / entry.staging
        made: set[Path] = {self._out}
        for name in entry.pending:
            target = self._out / name
            made |= {target.parent, target.parent.parent}
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                self._disk.rename(staging / staged_name(name), target)
            except FileNotFoundError:
                if not target.exists():
                    raise Damaged(
                        f"{target}: was to be moved here from {staging}, and is in neither place",
                        hint=f"remove {private(self._out)}/{entry.log}.json and all files of this log to do it anew",
                    ) from None
        for directory in sorted(made, reverse=True):
            self._disk.sync_directory(directory)
        self.book.enter(replace(entry, staging="", pending=()))


def private(out: Path) -> Path:
    """Where an export keeps what is not for readers."""
    return out / "_wald"


def staged_name(name: str) -> str:
    """What the file ``name`` is called while it is staged: there are no directories, and no pattern of readers fits."""
    return name.replace("/", ",") + ".staged"
