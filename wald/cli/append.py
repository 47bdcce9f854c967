"""``wald append``: send lines over the socket until all are durable or, on request, processed by a group."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click
from click.core import ParameterSource

import wald
from wald.cli.command import Command, examples
from wald.cli.options import due_option, duration_option, producer_at, root_option, route_argument, socket_option
from wald.cli.output import require_stdin, stdout_is_a_report
from wald.errors import DiskFailure, Interrupted, InvalidInput, Unavailable
from wald.format.protocol import REQUEST_MAX_BYTES
from wald.hints import command_line

if TYPE_CHECKING:
    from wald.client.producer import Durable, Producer

Encode = Callable[[bytes, str, int], Iterator[bytes]]
"""Whole lines, the name of their source, the number of the first line → payloads in order."""

Due = Callable[[], int]
"""Returns the due time of lines sent now, in ns since 1970."""

_READ_BYTES = 128 << 10  # one request's worth
_STDIN = "-"
_STDIN_PATHS = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


@click.command(
    cls=Command, epilog=examples("echo hello | wald append access", "wald append events --jsonl events.jsonl")
)
@route_argument
@click.argument("files", nargs=-1, metavar="[FILE]...")
@root_option
@socket_option
@click.option("--key-separator", metavar="SEP", help="Each line is KEY SEP VALUE; a line without SEP has no key.")
@click.option(
    "--jsonl", is_flag=True, help="Each line is a JSON object: value, and optionally key, time, not_before, headers."
)
@duration_option("--delay", None, "Do not deliver a record to workers until this long after it is sent.", days_max=3650)
@due_option("--at", "--delay", "Do not deliver records to workers before this time; a past time means at once.")
@duration_option(
    "--retry-for", "30s", "How long to wait for a daemon to come back; if none runs at the start, 2s unless given."
)
@click.option("--wait-processed", "group", metavar="GROUP", help="Wait until this group has processed all records.")
@duration_option("--processed-within", "30s", "With --wait-processed: the time limit, once all records are durable.")
@stdout_is_a_report
def append(
    root: Path,
    socket: Path | None,
    route: str,
    files: tuple[str, ...],
    key_separator: str | None,
    jsonl: bool,
    delay: float | None,
    at: int | None,
    retry_for: float,
    group: str | None,
    processed_within: float,
) -> None:
    """Append each line of stdin, or of each FILE, to ROUTE as a record, including a last line without a newline.

    Prints FIRST LAST, the sequences of the records that became durable, or nothing if there are none. Records of other
    producers may lie between them. The exit code is 0 only if every record is durable. If a line cannot be sent, the
    lines before it become durable, and no line after it is sent (exit code 2). If the daemon does not come back,
    stderr says how many records are durable, and how many may be (exit code 6, or 7 if its disk is full).

    With --jsonl, value is a string (or any other JSON, even null, whose text is stored unchanged) or value_hex, key is
    a string or key_hex, time is like 2026-11-21T10:00:00Z or ns since 1970, headers is an object of strings; the output
    of `wald read --format json` is accepted. Without a value the record is empty. Blank lines are ignored.

    --delay and --at are for work groups (`wald.WorkGroup`), which deliver a record once it is due; other readers get it
    at once. The time is stored in the header wald.not-before. With --jsonl, not_before of an object, written like time,
    overrides the option; if the object already has the header, the later time applies.

    With --wait-processed the command ends once the group has processed all records: its cursor has passed them, or its
    workers have acknowledged them; dead letters count as processed. If that does not happen in time, the records are
    durable nevertheless, and the exit code is 15. If the route has no such group, nothing is sent (exit code 3).
    """
    if jsonl and key_separator is not None:
        raise InvalidInput("--jsonl and --key-separator are mutually exclusive", hint="wald append --help")
    if key_separator == "":
        raise InvalidInput("--key-separator is empty", hint="--key-separator $'\\t'")
    if delay is not None and at is not None:
        raise InvalidInput("--delay and --at are mutually exclusive", hint="wald append --help")
    separator = None if key_separator is None else os.fsencode(key_separator)
    encode = _encoder(separator, jsonl=jsonl, due=_due(delay, at))
    names = files or (_STDIN,)
    for name in names:
        _check_readable(name)
    awaited = None if group is None else Awaited(root, route, group)
    durable = _Durable(awaited)
    wrong: InvalidInput | None = None
    source = click.get_current_context().get_parameter_source("retry_for")
    insists = source is not ParameterSource.DEFAULT
    with producer_at(root, socket, route, retry_for=retry_for, insists=insists) as producer:
        try:
            try:
                for name in names:
                    for payload in _payloads(name, producer, encode):
                        producer.publish(route, payload, columns=encode is not None)
                        durable.take(producer)
            except InvalidInput as error:
                wrong = error
            durable.extend(producer.flush())
        except (Unavailable, DiskFailure, KeyboardInterrupt) as error:
            durable.take(producer)
            unanswered = producer.unanswered
            if isinstance(error, KeyboardInterrupt) and not unanswered:
                raise
            failure = Interrupted("interrupted") if isinstance(error, KeyboardInterrupt) else error
            message, hint = f"{failure.message}; {durable}", failure.hint
            if unanswered:
                message += f", {unanswered} are not acknowledged and may or may not be in the log"
                start = f" --from {durable.last + 1}" if durable.last else ""
                reading = f"{command_line(root, f'read {route}')}{start} shows which of them are there"
                hint = f"{hint}; then {reading}" if hint else reading
            raise type(failure)(message, hint=hint) from error
        finally:
            with uninterrupted():
                durable.take(producer)
                if durable.last:
                    click.echo(f"{durable.first} {durable.last}")
    if wrong is not None:
        sent = f"{durable} before it, and no line after it is sent" if durable.count else "nothing was sent"
        raise InvalidInput(f"{wrong.message}; {sent}", hint=wrong.hint)
    if awaited is not None:
        awaited.wait(processed_within)


@dataclass(slots=True)
class _Durable:
    """The range of sequences that became durable, and how many records in it were sent by this command."""

    awaited: Awaited | None
    first: int = 0
    last: int = 0
    count: int = 0

    def take(self, producer: Producer) -> None:
        """Add all acknowledged records, even if Ctrl-C interrupts."""
        with uninterrupted():
            self.extend(producer.acknowledged())

    def extend(self, acknowledged: list[Durable]) -> None:
        for first, last in acknowledged:
            self.first = self.first or first
            self.last = last
            self.count += last - first + 1
            if self.awaited is not None:
                self.awaited.unprocessed.add(first, last)

    def __str__(self) -> str:
        if not self.count:
            return "nothing is durable"
        return f"{self.count} records are durable (sequences {self.first} to {self.last})"


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended."""
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.default_int_handler:
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if came:
        raise KeyboardInterrupt


def _due(delay: float | None, at: int | None) -> Due | None:
    if delay is not None:  # relative to the time when a line is sent, which may be long after the command began
        delay_ns = int(delay * 1e9)
        return lambda: time.time_ns() + delay_ns
    return None if at is None else lambda: at


def _encoder(separator: bytes | None, *, jsonl: bool, due: Due | None) -> Encode | None:
    """Return the encoder of ``KEY <separator> VALUE``, of values, or of JSON objects; None to send lines unchanged."""
    if not jsonl and separator is None and due is None:
        return None
    from wald.client.payloads import column_payloads, encode_headers, json_payloads
    from wald.format.records import encode_columns, with_not_before

    def encode(lines: bytes, _name: str, _number: int) -> Iterator[bytes]:
        values = lines.split(b"\n")[:-1]
        keys: list[bytes | None] | None = None
        if separator is not None:  # a line without it has no key
            parts = [line.partition(separator) for line in values]
            keys = [key if found else None for key, found, _ in parts]
            values = [value if found else line for line, found, value in parts]
        if due is None:
            yield encode_columns(values, keys=keys)  # hardly larger than the lines, so it need not be split
        else:
            headers = [encode_headers(with_not_before(None, due()))] * len(values)
            yield from column_payloads(values, keys=keys, headers=headers)

    if jsonl:  # times in an object win
        return lambda lines, name, number: json_payloads(lines, name, number, None if due is None else due())
    return encode


def _check_readable(name: str) -> None:
    if name == _STDIN or name in _STDIN_PATHS:
        require_stdin("name a FILE after ROUTE, or connect a pipe to stdin")
    if name != _STDIN:
        try:
            os.close(os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            if Path(name).is_dir():
                raise IsADirectoryError(None, "Is a directory")
        except OSError as error:
            raise InvalidInput(f"{name}: {error.strerror}", hint=f"ls -l {name}; nothing was sent") from error


def _payloads(name: str, producer: Producer, encode: Encode | None) -> Iterator[bytes]:
    descriptor = 0 if name == _STDIN else os.open(name, os.O_RDONLY | os.O_CLOEXEC)

    def read() -> bytes:
        producer.wait_for(descriptor)
        return os.read(descriptor, _READ_BYTES)

    shown = "stdin" if name == _STDIN else name
    try:
        line_number = 1
        for lines in whole_lines(read, shown):
            if encode is None:
                yield lines
            else:
                yield from encode(lines, shown, line_number)
                line_number += lines.count(b"\n")
    finally:
        if name != _STDIN:
            os.close(descriptor)


def whole_lines(read: Callable[[], bytes], name: str) -> Iterator[bytes]:
    """Yield the bytes returned by ``read`` as payloads of whole lines; add a newline to the last line."""
    pending: list[bytes] = []
    pending_bytes = offset = 0
    while chunk := read():
        end = chunk.rfind(b"\n") + 1
        if end:
            yield b"".join([*pending, chunk[:end]]) if pending else chunk[:end]
            offset += pending_bytes + end
            pending, pending_bytes, chunk = [], 0, chunk[end:]
        if chunk:
            pending.append(chunk)
            pending_bytes += len(chunk)
        if pending_bytes > REQUEST_MAX_BYTES:
            message = f"{name}: offset {offset}: a line of more than {REQUEST_MAX_BYTES} bytes"
            raise InvalidInput(message, hint="write it to the route's FIFO, which accepts a line in pieces")
    if pending:
        yield b"".join([*pending, b"\n"])


class Awaited:
    """Records sent to ``route`` that ``group`` has not yet processed."""

    def __init__(self, root: Path, route: str, group: str) -> None:
        from wald.work.snapshot import Progress, Unprocessed

        self._log = wald.open(root)
        self.unprocessed = Unprocessed(route, group)
        self._progress = Progress(self._log, route, group)
        self._progress.read()

    def wait(self, seconds: float) -> None:
        from wald.work.snapshot import not_processed, pause

        until = time.monotonic() + seconds
        sent, slept = self.unprocessed.count, 0.0
        while True:
            began = time.monotonic()
            self._progress.read()
            self.unprocessed.update(self._progress)
            now = time.monotonic()
            if not self.unprocessed.count:
                return
            if now >= until:
                raise not_processed(self._log, self.unprocessed, sent, seconds)
            slept = pause(slept, now - began)
            time.sleep(min(slept, until - now))
