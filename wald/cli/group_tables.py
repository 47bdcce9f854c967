"""What ``wald group pending`` prints: who has which records, what waits until when, and what is given up and why."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from wald.cli.output import aligned
from wald.format.times import utc
from wald.setting_types import format_seconds

if TYPE_CHECKING:
    from wald.format.work import DeadRecord
    from wald.work.snapshot import Out, Waiting

SHOWN = 20
_NS = 10**9


def out_table(out: list[Out], now_ns: int, count: int | None) -> Iterator[str]:
    """What workers have, as a table; none if that is nothing."""
    rows = [(*_range(each), each.worker, *_until(each, now_ns), each.tries) for each in out]
    yield from _table(("OUT", "TO", "WORKER", "UNTIL", "LEFT", "TRIES"), rows, (0, 1, 4, 5), count)


def one_line(reason: str) -> str:
    """What a worker has said, for a line of a table."""
    return " ".join(reason.split())


def _until(out: Out, now_ns: int) -> tuple[str, str]:
    if out.until_ns is None:
        return "-", "until it ends"
    return utc(out.until_ns), format_seconds((out.until_ns - now_ns) / _NS)


def waiting_table(waiting: list[Waiting], now_ns: int, count: int | None) -> Iterator[str]:
    """What is not due yet, as a table."""
    rows = [
        (
            *_range(each),
            utc(each.due_ns),
            format_seconds((each.due_ns - now_ns) / _NS),
            each.tries,
            one_line(each.reason),
        )
        for each in waiting
    ]
    yield from _table(("WAITING", "TO", "DUE", "IN", "TRIES", "REASON"), rows, (0, 1, 3, 4), count)


def dead_table(dead: list[DeadRecord], count: int | None) -> Iterator[str]:
    """What is being given up, as a table."""
    rows = [(each.sequence, utc(each.at_ns), each.tries, each.route, one_line(each.reason)) for each in dead]
    yield from _table(("GIVING UP", "SINCE", "TRIES", "DEAD LETTER TO", "REASON"), rows, (0, 2), count)


def _table(
    headings: tuple[str, ...], rows: Sequence[tuple[object, ...]], numeric: tuple[int, ...], count: int | None
) -> Iterator[str]:
    shown = count or SHOWN
    if rows:
        lines = list(aligned([headings, *(tuple(map(str, row)) for row in rows[:shown])], numeric))
        if more := len(rows) - shown:
            lines += [f"and {more} more; -n {len(rows)} shows all"] * (more > 0)
        yield "\n".join(lines)


def _range(each: Out | Waiting) -> tuple[int, int]:
    return each.first, each.last
