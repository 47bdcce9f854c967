"""Logs that hypothesis makes up: interleaved routes, lines and columns, last lines without a newline, long records."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st
from logs import Built

from wald.format.batch import Flag

_LINE = st.binary(max_size=12).map(lambda value: value.replace(b"\n", b"\r"))
_ROUTE = st.sampled_from(["a", "a", "a", "b"])
_HEADERS = st.none() | st.sampled_from([b'{"h":"1"}', b"{}", b"\xff", b'{"not":1}'])


@dataclass(frozen=True, slots=True)
class Lines:
    route: str
    lines: list[bytes]
    terminated: bool = True

    def append(self, built: Built) -> None:
        payload = b"\n".join(self.lines) + b"\n" * self.terminated
        built.append(self.route, payload, len(self.lines), flags=Flag.NONE if self.terminated else Flag.UNTERMINATED)


@dataclass(frozen=True, slots=True)
class Columns:
    route: str
    rows: list[tuple[bytes, bytes | None, bytes | None, int]]

    def append(self, built: Built) -> None:
        values, keys, headers, times = map(list, zip(*self.rows, strict=True))
        built.columns(self.route, values, keys=keys, headers=headers, times_ns=times)


@dataclass(frozen=True, slots=True)
class Long:
    """One record in several batches, with a batch of another route between the first two."""

    route: str
    pieces: list[bytes]

    def append(self, built: Built) -> None:
        for number, piece in enumerate(self.pieces):
            ends = number == len(self.pieces) - 1
            built.piece(self.route, piece + b"\n" * ends, begins=number == 0, ends=ends)
            if number == 0:
                built.lines("between", [b"x"])


@dataclass(frozen=True, slots=True)
class Cut:
    """Begin another segment; with ``sealed``, compress the earlier ones."""

    sealed: bool

    def append(self, built: Built) -> None:
        if built.writer.has_advanced:
            built.cut()
        if self.sealed:
            built.seal()


Step = Lines | Columns | Long | Cut

STEPS = st.lists(
    st.one_of(
        st.builds(Lines, _ROUTE, st.lists(_LINE, min_size=1, max_size=6)),
        # Its last line is not empty: a payload that ends with a newline has no unterminated record.
        st.builds(Lines, _ROUTE, st.lists(_LINE.map(lambda line: line + b"."), min_size=1, max_size=3), st.just(False)),
        st.builds(
            Columns,
            _ROUTE,
            st.lists(
                st.tuples(st.binary(max_size=8), st.none() | st.binary(max_size=4), _HEADERS, st.integers(-9, 9)),
                min_size=1,
                max_size=4,
            ),
        ),
        st.builds(Long, _ROUTE, st.lists(_LINE.map(lambda line: line + b"-"), min_size=2, max_size=3)),
        st.builds(Cut, st.booleans()),
    ),
    max_size=12,
)


def build(path: Path, steps: list[Step]) -> Built:
    """A log that has gone these steps; route a is there, and may be empty."""
    built = Built(path)
    built.lines("b", [b"the first record of all"])
    (built.root.routes / "a").mkdir()
    for step in steps:
        step.append(built)
    return built
