"""A snapshot as coloured lines, cut to a given width and height; independent of any terminal.

    wald top  /var/spool/wald                                      q leaves
    daemon    which one writes
    head      how far, how fast
    segments  a bar from the oldest to the newest, and its legend
    sealing   how many segments wait, how many are done
    disk      a bar, how much is free, and for how long

    ROUTE … GROUP … PINS      most first; the last line sums up the rows that do not fit

Every state has a texture besides its colour, so that a bar can be read without colours.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping, Sequence
from io import StringIO
from itertools import accumulate

from rich.console import Console, Group
from rich.text import Text

from wald.retention.backlog import Condition
from wald.retention.cursors import CursorState
from wald.setting_types import format_bytes, format_seconds
from wald.status.rates import Activity, Inventory, Row, Snapshot

_LABEL_CELLS = 10
_BAR_CELLS_MAX = 60
_GAP = "   "  # between the pieces of a line
_NAME_CELLS_MIN = 12  # long names are shortened to this before a column is dropped
_OLD_SECONDS = 5.0  # younger numbers are shown as current
_DAY = 86400
_TEXTURES = {
    Condition.RELEASED: ("·", "bright_black"),
    Condition.FREE: ("░", "green"),
    Condition.PINNED: ("█", "yellow"),
    Condition.UNREADABLE: ("X", "red"),
    Condition.WAITING: ("▒", "blue"),
    Condition.ACTIVE: ("▓", "cyan"),
}
_CURSOR_WORDS = {
    CursorState.ABSENT: ("no cursor", "yellow"),
    CursorState.UNREADABLE: ("unreadable", "red"),
    CursorState.LINKED: ("linked", "red"),
    CursorState.FOREIGN: ("foreign", "red"),
    CursorState.BEYOND: ("beyond", "red"),
}
_HEADINGS = ("ROUTE", "LAST", "IN/S", "GROUP", "CURSOR", "LAG", "OLDEST", "OUT/S", "PINS")
_NAMES = (0, 3)
_LEAST_FIRST = (1, 6, 4, 7, 2, 3, 5)  # columns, in the order in which they are dropped on a narrow screen

Cell = tuple[str, str]
"""Text and its style."""


def drawn(snapshot: Snapshot, *, width: int, height: int) -> Group:
    left = Text.assemble(("wald top", "bold"), "  ", _printable(snapshot.root))
    left.truncate(max(0, width - 10), overflow="ellipsis", pad=True)
    title = _line(Text.assemble(left, ("  q leaves", "bright_black")))
    return Group(title, *lines(snapshot, width=width, height=height - 1))


def plain(snapshot: Snapshot, *, width: int) -> str:
    console = Console(file=StringIO(), width=width, color_system=None)
    with console.capture() as captured:
        console.print(Group(*lines(snapshot, width=width, height=None)))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def lines(snapshot: Snapshot, *, width: int, height: int | None) -> list[Text]:
    """Return the lines below the title, at most ``height``; None for no limit."""
    shown: list[Text] = []
    for problem in snapshot.problems:
        shown += [Text(line, "bold red") for line in textwrap.wrap(_printable(problem), width)]
    shown += _activity(snapshot.activity, width)
    shown += _inventory(snapshot.inventory, width)
    if (seen := snapshot.activity) is not None:
        sealing: list[Cell] = [
            (f"{seen.waiting_segments:,} waiting", "blue" if seen.waiting_segments else ""),
            (f"{seen.sealed_segments:,} sealed since the start", ""),
            (_bytes_rate(seen.sealed_bytes_per_second), ""),
        ]
        shown += _packed("sealing", sealing, width)
    if snapshot.inventory is not None:
        shown += _disk(snapshot.inventory, width)
        shown.append(Text())
        room = None if height is None else max(1, height - len(shown))
        shown += _table(snapshot.inventory.rows, width, room)
    return shown if height is None else shown[: max(0, height)]


def cells(amounts: Sequence[int], width: int) -> list[int]:
    """Divide ``width`` cells among amounts in proportion; an amount above 0 gets at least one."""
    total = sum(amounts)
    if not total:
        return [0] * len(amounts)
    least = [1 if amount else 0 for amount in amounts]
    spare = max(0, width - sum(least))
    ends = [round(end * spare / total) for end in accumulate(amounts, initial=0)]
    return [one + end - start for one, start, end in zip(least, ends, ends[1:], strict=False)]


def _activity(activity: Activity | None, width: int) -> Iterator[Text]:
    if activity is None:
        yield from _packed("head", [("-", "")], width)
        return
    daemon = (_printable(activity.daemon), "") if activity.daemon else ("none runs", "bold yellow")
    yield from _packed("daemon", [daemon], width)
    if activity.durable_seconds is None:
        yield from _packed("head", [("nothing is durable yet", "")], width)
        return
    pieces = [
        (f"{activity.sequence:,}", "bold"),
        (f"{_rate(activity.records_per_second)} records/s", ""),
        (_bytes_rate(activity.bytes_per_second), ""),
        (f"last commit {format_seconds(activity.durable_seconds)} ago", "bright_black"),
    ]
    yield from _packed("head", pieces, width)


def _inventory(inventory: Inventory | None, width: int) -> Iterator[Text]:
    if inventory is None:
        yield from _packed("segments", [("-", "")], width)
        return
    states = [state for state in Condition if state in inventory.states]
    amounts = [inventory.states[state] for state in states]
    bar = Text()
    for state, count in zip(states, cells([a.stored_bytes for a in amounts], _bar_cells(width)), strict=True):
        glyph, style = _TEXTURES[state]
        bar.append(glyph * count, style)
    total = format_bytes(sum(amount.stored_bytes for amount in amounts))
    pieces = [(f"{sum(amount.segments for amount in amounts):,} segments, {total}", "bold")]
    if inventory.age_seconds >= _OLD_SECONDS:
        pieces.append((f"as of {format_seconds(inventory.age_seconds)} ago", "bright_black"))
    yield from _packed("segments", pieces, width)
    yield _labelled("", bar)
    legend = [
        (f"{glyph} {state.value} {amount.segments:,}, {format_bytes(amount.stored_bytes)}", style)
        for state, amount in zip(states, amounts, strict=True)
        for glyph, style in [_TEXTURES[state]]
    ]
    yield from _packed("", legend, width)


def _disk(inventory: Inventory, width: int) -> Iterator[Text]:
    used, free = cells([inventory.total_bytes - inventory.free_bytes, inventory.free_bytes], _bar_cells(width))
    style = _urgency(inventory)
    yield _labelled("disk", Text.assemble(("█" * used, style), ("░" * free, "bright_black")))
    pieces = [(f"{format_bytes(inventory.free_bytes)} free of {format_bytes(inventory.total_bytes)}", "bold")]
    if inventory.growth_bytes_per_second is None:
        pieces.append(("growth rate not known yet", "bright_black"))
    else:
        pieces.append((f"grows {format_bytes(inventory.growth_bytes_per_second * _DAY)} a day", ""))
        if inventory.seconds_until_full is not None:
            pieces.append((f"full in {format_seconds(inventory.seconds_until_full)} if nothing is reclaimed", style))
    yield from _packed("", pieces, width)


def _urgency(inventory: Inventory) -> str:
    """The colour of a disk: red with a tenth left or a day, yellow with a quarter or a week."""
    share = inventory.free_bytes / inventory.total_bytes if inventory.total_bytes else 0.0
    days = float("inf") if inventory.seconds_until_full is None else inventory.seconds_until_full / _DAY
    if share < 0.1 or days < 1:
        return "red"
    return "yellow" if share < 0.25 or days < 7 else "green"


def _table(rows: Sequence[Row], width: int, room: int | None) -> Iterator[Text]:
    """The headings and the rows that fit; the last line summarises the others."""
    if not rows:
        yield _line(Text("no routes yet", "bright_black"))
        return
    count = len(rows) if room is None or len(rows) < room else max(0, room - 2)
    grid = [[(heading, "bright_black") for heading in _HEADINGS], *map(_cells_of, rows[:count])]
    widths = _widths(grid, width)
    for row in grid:
        shown = [_fitted(row[number], column_width, number in _NAMES) for number, column_width in widths.items()]
        yield _line(Text("  ").join(shown))
    if count < len(rows):
        yield _line(Text(_summed_up(rows[count:]), "bright_black"))


def _fitted(cell: Cell, width: int, is_name: bool) -> Text:
    text = Text(*cell)
    if is_name:
        text.truncate(width, overflow="ellipsis", pad=True)
    else:
        text.pad_left(width - text.cell_len)
    return text


def _cells_of(row: Row) -> list[Cell]:
    pale = "bright_black"
    cursor = (f"{row.cursor:,}", "") if row.state is CursorState.VALID else _CURSOR_WORDS[row.state]
    held = (format_bytes(row.held_bytes), "bold yellow" if row.held_bytes else pale)
    return [
        (row.route, pale if row.retired else "bold"),
        ("?" if row.last_sequence is None else f"{row.last_sequence:,}", ""),
        (_rate(row.received_per_second), ""),
        (_printable(row.group), ""),
        cursor,
        (f"{row.lag_records:,}", "" if row.lag_records else pale),
        ("-" if row.oldest_seconds is None else format_seconds(row.oldest_seconds), ""),
        (_rate(row.processed_per_second), ""),
        ("retired", pale) if row.retired else held,
    ]


def _widths(grid: Sequence[Sequence[Cell]], width: int) -> dict[int, int]:
    """The widths of the columns that fit: long names are shortened first, then the least important columns go."""
    widths = {number: max(Text(row[number][0]).cell_len for row in grid) for number in range(len(_HEADINGS))}
    least = widths | {name: min(_NAME_CELLS_MIN, widths[name]) for name in _NAMES}
    for column in _LEAST_FIRST:
        if _row_cells(least) <= width:
            break
        del widths[column], least[column]
    for name in sorted(widths.keys() & _NAMES, key=lambda name: -widths[name]):
        widths[name] = max(least[name], widths[name] - max(0, _row_cells(widths) - width))
    return widths


def _row_cells(widths: Mapping[int, int]) -> int:
    return sum(widths.values()) + 2 * (len(widths) - 1)


def _summed_up(rows: Sequence[Row]) -> str:
    routes = len({row.route for row in rows})
    what = f"{routes:,} more route{'s' * (routes != 1)}"
    if len(rows) > routes:
        what = f"{len(rows):,} more groups of {routes:,} route{'s' * (routes != 1)}"
    most = max(row.held_bytes for row in rows)
    return f"and {what}, pinning {f'{format_bytes(most)} or less each' if most else 'nothing'}"


def _packed(label: str, pieces: Sequence[Cell], width: int) -> Iterator[Text]:
    """Pieces after a label, in as many lines as needed; no piece is broken."""
    room = max(1, width - _LABEL_CELLS)
    line = Text()
    for text, style in pieces:
        piece = Text(text, style)
        if line and line.cell_len + len(_GAP) + piece.cell_len > room:
            yield _labelled(label, line)
            label, line = "", Text()
        line = Text.assemble(line, _GAP if line else "", piece)
    yield _labelled(label, line)


def _labelled(label: str, line: Text) -> Text:
    return _line(Text.assemble((label.ljust(_LABEL_CELLS), "bright_black"), line))


def _line(line: Text) -> Text:
    """The text as one line, cut at the edge, never wrapped."""
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def _bar_cells(width: int) -> int:
    return max(1, min(_BAR_CELLS_MAX, width - _LABEL_CELLS))


def _rate(per_second: float | None) -> str:
    if per_second is None:
        return "-"
    return f"{per_second:.1f}" if 0 < per_second < 10 else f"{per_second:,.0f}"


def _bytes_rate(per_second: float | None) -> str:
    return "- B/s" if per_second is None else f"{format_bytes(per_second)}/s"


def _printable(text: str) -> str:
    """Text without control characters, because those in a file name could move the terminal's cursor."""
    return "".join(character if character.isprintable() else "?" for character in text)
