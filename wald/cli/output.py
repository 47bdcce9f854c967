"""Output of commands: tables, JSON, a progress bar, and the standard streams.

A parent may have closed a stream (cron, ssh), and a stream may be full or broken. The next opened file, possibly a
file of the log, would get a closed descriptor from 0 to 2. So the descriptor is first opened on /dev/null in the wrong
direction, so that reading or writing still fails.
"""

from __future__ import annotations

import codecs
import fcntl
import io
import os
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import TYPE_CHECKING, ParamSpec, TextIO, TypeVar

import click

from wald.errors import InvalidInput, WaldError

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

P = ParamSpec("P")
R = TypeVar("R")
_STDIN, _STDOUT, _STDERR = range(3)
_WRONG_WAY = {_STDIN: os.O_WRONLY, _STDOUT: os.O_RDONLY, _STDERR: os.O_RDONLY}
_ignored = [False]  # True if stdout may fail
_ERRORS = "wald.escaped"  # error handler for characters that the encoding lacks


def aligned(rows: Sequence[Sequence[str]], numeric: Collection[int]) -> Iterator[str]:
    """Yield the rows as lines of a table, in which ``numeric`` columns, from 0, are aligned to the right."""
    # Unprintable characters are escaped, so that no name ends a line or moves a terminal's cursor.
    shown = [[each if each.isprintable() else repr(each)[1:-1] for each in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    for row in shown:
        cells = (
            cell.rjust(width) if number in numeric else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def json_line(command: str, fields: object) -> str:
    """Return one JSON object of a command such as "cursor.list" or "reclaim"; docs/json.md lists its keys."""
    import json

    from wald.status.schema import fields_of

    named = {"schema": f"wald.{command}/1"} | fields_of(fields)
    text = json.dumps(named, ensure_ascii=False, default=fields_of)
    # JSON is UTF-8 in every locale; the surrogates of a path that is not UTF-8 are valid JSON only as escapes.
    return text if text.isascii() or _is_printable(text) else json.dumps(named, default=fields_of)


def _is_printable(text: str) -> bool:
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return codecs.lookup(encoding).name == "utf-8"


def print_result(command: str, as_json: bool, fields: object, lines: Iterable[object]) -> None:
    """Print a command's result: an object with --json, otherwise lines of text."""
    click.echo(json_line(command, fields) if as_json else "\n".join(map(str, lines)))


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


@contextmanager
def progress(label: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a progress bar if stderr is a terminal; yield a function to call with each amount done."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    with click.progressbar(length=total, label=label, file=sys.stderr) as bar:
        yield bar.update


def _escaped(error: UnicodeError) -> tuple[bytes, int]:
    """Write the bytes of a path that is not UTF-8 unchanged, and any other character as an escape."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    wrong = error.object[error.start : error.end]
    return b"".join(map(_escaped_character, wrong)), error.end


def _escaped_character(character: str) -> bytes:
    is_byte = "\udc80" <= character <= "\udcff"
    return character.encode("ascii", "surrogateescape" if is_byte else "backslashreplace")


codecs.register_error(_ERRORS, _escaped)


def prepare_streams() -> None:
    """Open closed streams, and turn failures of stdout into errors; call this before opening any file."""
    for descriptor, direction in _WRONG_WAY.items():
        try:
            fcntl.fcntl(descriptor, fcntl.F_GETFD)
        except OSError:
            opened = os.open(os.devnull, direction)  # gets the lowest free descriptor, which is this one
            os.set_inheritable(opened, True)
    _ignored[0] = False
    sys.stdout = _text(sys.stdout, _STDOUT, lambda: io.BufferedWriter(_Stdout(_STDOUT, "w", closefd=False)))
    sys.stderr = _text(sys.stderr, _STDERR, lambda: _Stderr(_STDERR, "w", closefd=False))


def ignore_stdout() -> None:
    """Ignore failures of stdout, for a command that only reports on stdout."""
    _ignored[0] = True


def stdout_is_a_report(function: Callable[P, R]) -> Callable[P, R]:
    """Mark a command that only reports on stdout, so its exit code does not depend on stdout."""

    @wraps(function)
    def command(*args: P.args, **kwargs: P.kwargs) -> R:
        ignore_stdout()
        return function(*args, **kwargs)

    return command


def write_stdout(data: bytes | memoryview) -> None:
    """Write all of ``data`` without Python's buffers: when this returns, stdout has it."""
    view = memoryview(data)
    while view:
        view = view[_write(view) :]


def require_stdin(hint: str) -> None:
    if fcntl.fcntl(_STDIN, fcntl.F_GETFL) & os.O_ACCMODE == os.O_WRONLY:
        raise InvalidInput("stdin is closed", hint=hint)


class _Stdout(io.FileIO):
    def write(self, data: ReadableBuffer) -> int:
        return _write(memoryview(data))


class _Stderr(io.FileIO):
    """Drops messages that cannot be written: the work continues, and the exit code reports its result."""

    def write(self, data: ReadableBuffer) -> int:
        view = memoryview(data)
        length = view.nbytes
        try:
            while view:
                view = view[os.write(_STDERR, view) :]
        except OSError:
            pass
        return length


def _write(data: memoryview) -> int:
    """Write some of ``data`` to stdout; return the number of bytes."""
    try:
        return os.write(_STDOUT, data)
    except OSError as error:
        if not _ignored[0]:
            ignore_stdout()  # buffered output is dropped when the program ends
            if isinstance(error, BrokenPipeError):
                raise
            raise WaldError(f"stdout: {error.strerror}", hint="write to a file or a pipe that is open") from error
        return data.nbytes


def _text(stream: TextIO | None, descriptor: int, raw: Callable[[], io.BufferedWriter | _Stderr]) -> TextIO:
    """Return a text stream that writes to ``raw``, in place of the interpreter's stream; keep any other stream."""
    if stream is None:
        return io.TextIOWrapper(raw(), errors=_ERRORS, write_through=descriptor == _STDERR)
    if isinstance(stream, io.TextIOWrapper) and _descriptor(stream) == descriptor:
        return io.TextIOWrapper(
            raw(),
            encoding=stream.encoding,
            errors=_ERRORS,
            line_buffering=stream.line_buffering,
            write_through=descriptor == _STDERR,
        )
    return stream


def _descriptor(stream: TextIO) -> int:
    try:
        return stream.fileno()
    except (OSError, ValueError):
        return -1
