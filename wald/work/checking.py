"""Whether the journals of the work groups of a log are whole: what a verification of the log reports of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from wald.checking.checker import Finding, Level
from wald.errors import Damaged, NotFound
from wald.files.layout import Root
from wald.work.picture import Picture, WorkFile, read_of_group, work_files


@dataclass(frozen=True, slots=True)
class Checked:
    """A journal, and what was found in it."""

    file: WorkFile
    finding: Finding


def check_journals(root: Root, log_id: bytes) -> Iterator[Checked]:
    """Read the journal of every work group, also of those whose owners write to them meanwhile; nothing is changed."""
    for route in root.route_names():
        files: list[WorkFile] = []
        with suppress(NotFound, OSError):  # removed meanwhile; or it cannot be listed, which is reported of its cursors
            files = work_files(root, route)
        for file in files:
            yield from (Checked(file, found) for found in _findings(file, log_id))


def _findings(file: WorkFile, log_id: bytes) -> Iterator[Finding]:
    path = file.path
    try:
        reading, lines, damage = read_of_group(file, log_id)
        Picture(path, lines, floor=0, now_ns=0)
    except FileNotFoundError:  # removed meanwhile
        return
    except Damaged as error:
        yield Finding.of(Level.ERROR, path, error.message)
        return
    except OSError as error:
        yield Finding(Level.ERROR, path, 0, f"cannot be read ({error.strerror})")
        return
    if damage:
        yield Finding.of(Level.ERROR, path, f"{damage}; with it, the group does not start")
        return
    yield Finding(Level.OK, path, 0, f"{reading.lines} lines")
    if reading.torn:
        yield Finding(Level.INFO, path, reading.end, "an unfinished line; the owner of the group cuts it")
