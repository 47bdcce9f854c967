"""How many records of work groups are where: by their journals, read beside their owners and without a lock."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from typing import NamedTuple

from wald.errors import Damaged, InvalidInput, NotFound
from wald.log import Log
from wald.work.snapshot import Out, Waiting, WorkFile, read_status, work_files

_FIRST = 30  # runs of records in the same state


class WorkCounts(NamedTuple):
    """How many records of a work group are where.

    Attributes:
        unusable: whether its journal is damaged.
        giving_up_to: of each record that is being given up, the route that its dead letter goes to.
        first_leased, first_waiting: the first of them, and who has them, or what they wait for.
    """

    leased: int
    waiting: int
    giving_up: int
    unusable: bool
    giving_up_to: tuple[str, ...] = ()
    first_leased: tuple[Out, ...] = ()
    first_waiting: tuple[Waiting, ...] = ()


def work_counts(log: Log, groups: list[tuple[str, str]]) -> dict[tuple[str, str], WorkCounts]:
    """Those of the groups that are work groups; each costs as much as its journal is long."""
    found = {}
    files: dict[tuple[str, str], WorkFile] = {}
    for route in {route for route, _ in groups}:
        with suppress(NotFound, InvalidInput, OSError):  # removed in the meantime
            for each in reversed(work_files(log.root, route)):  # if two have the same name, the owner's comes first
                files[route, each.group] = each
    for route, group in groups:
        if (file := files.get((route, group))) is None:
            continue
        with suppress(NotFound, InvalidInput, OSError, Damaged):  # removed in the meantime
            seen = read_status(log, file, time.time_ns())
            picture, goals = seen.snapshot, tuple(each.route for each in seen.snapshot.dead)
            found[route, group] = WorkCounts(
                count_of(picture.out()),
                count_of(picture.waiting()),
                len(goals),
                bool(seen.damage),
                goals,
                tuple(islice(picture.out(), _FIRST)),
                tuple(islice(picture.waiting(), _FIRST)),
            )
    return found


def count_of(runs: Iterable[Out | Waiting]) -> int:
    """How many records these are."""
    return sum(each.last - each.first + 1 for each in runs)
