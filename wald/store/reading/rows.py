"""The records of a batch, decoded, of which a :class:`Record` is made when it is wanted.

The garbage collector looks at each object of Python again and again, but not at bytes. So many records cost more than
the lists of bytes that they are made of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import TypeVar

from wald.format.record import Record

T = TypeVar("T")
_RECORD: Callable[[tuple[object, ...]], Record] = partial(tuple.__new__, Record)  # in half the time of Record(*fields)


@dataclass(frozen=True, slots=True)
class Rows:
    """Consecutive records of one route.

    Attributes:
        first: the sequence of the first one.
        count: how many there are; the lists have one for each, and may have more.
        keys, times, headers: None if no record has any.
        terminated: whether the last line ended with a newline.
    """

    route: str
    first: int
    count: int
    append_time_ns: int
    values: Sequence[bytes]
    keys: Sequence[bytes | None] | None = None
    times: Sequence[int | None] | None = None
    headers: Sequence[bytes | None] | None = None
    terminated: bool = True

    def records(self, first: int, last: int) -> Iterator[Record]:
        """Those of the records that are numbered ``first`` to ``last``."""
        here = self._place(first, last)
        numbers = range(self.first + here.start, self.first + here.stop)
        end = 0 if self.terminated else self.first + self.count - 1
        ended = (number != end for number in numbers) if end in numbers else repeat(True)
        keys, times, headers = (_part(column, here) for column in (self.keys, self.times, self.headers))
        made_of = (repeat(self.route), numbers, self.values[here], repeat(self.append_time_ns), keys, times, headers)
        return map(_RECORD, zip(*made_of, ended, strict=False))

    def values_of(self, first: int, last: int) -> Sequence[bytes]:
        """As :meth:`records`, but the values alone."""
        return self.values[self._place(first, last)]

    def _place(self, first: int, last: int) -> slice:
        return slice(max(0, first - self.first), max(0, min(last + 1 - self.first, self.count)))


def _part(column: Sequence[T] | None, here: slice) -> Sequence[T] | repeat[None]:
    return repeat(None) if column is None else column[here]
