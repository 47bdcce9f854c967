"""``wald append``: records are stored intact and once, with their due times, and FIRST LAST reports their sequences."""

import json
import os
import re
import signal
import subprocess
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from peer import Peer
from running import TIMEOUT_SECONDS, Daemon, command, eventually, feed, launched, output_of, refusal_of, wald

from wald.cli.append import uninterrupted
from wald.format.protocol import FRAME_MAX_BYTES, Publish
from wald.format.records import NOT_BEFORE, Record, not_before
from wald.log import Log

AWKWARD = b"crlf\r\n\rlone\r\n\n\nnul\0nul\n\xff\xfe not utf-8\n" + "größe\n".encode()


def records_of(root: Path) -> list[dict[str, Any]]:
    """Return the records of route a, parsed from JSON."""
    return [json.loads(line) for line in output_of("read", "a", "--format", "json", "--root", root).splitlines()]


def test_every_byte_comes_back(daemon: Daemon, root: Path, tmp_path: Path) -> None:
    """CRLF, a lone carriage return, empty lines, NUL bytes and invalid UTF-8 are kept as content.

    The last line of each file is a record, which the next file does not continue. The long input has 40 MB without a
    newline, and lines that end at every offset around the size of a request.
    """
    path = tmp_path / "unterminated"
    path.write_bytes(b"one\ntwo")
    long = os.urandom(20 << 20).hex().encode()
    edges = b"".join(b"x" * length + b"\n" for length in range((128 << 10) - 9, (128 << 10) + 9))
    text = edges + long + b"\n" + edges

    assert output_of("append", "a", "--root", root, stdin=AWKWARD) == b"1 7\n"
    assert output_of("append", "a", path, path, "--root", root) == b"8 11\n"
    assert output_of("append", "a", "--root", root, stdin=text) == b"12 48\n"
    assert output_of("read", "a", "--root", root) == AWKWARD + b"one\ntwo\none\ntwo\n" + text


def test_a_restart_of_the_daemon_costs_and_doubles_nothing(daemon: Daemon, root: Path) -> None:
    """The daemon is stopped and killed several times while one append is sending lines."""
    lines = [b"%06d %s\n" % (number, b"x" * 300) for number in range(16_000)]
    with launched(command("append", "a", "--root", root), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        for start, end in enumerate((daemon.stop, daemon.kill) * 2):
            feed(process, b"".join(lines[start * 4000 : start * 4000 + 4000]))
            end()
            daemon.start_again()
        stdout, _ = process.communicate()

    assert process.returncode == 0
    assert stdout == b"1 16000\n"
    assert output_of("read", "a", "--root", root) == b"".join(lines)


def test_what_was_under_way_is_sent_again_without_new_input(daemon: Daemon, root: Path) -> None:
    """The daemon dies during a commit round while stdin is silent; the lines still arrive."""
    with launched(command("append", "a", "--root", root), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        feed(process, b"first\n")
        eventually(lambda: wald("read", "a", "--root", root).stdout == b"first\n")
        os.kill(daemon.process.pid, 19)  # SIGSTOP: it accepts nothing more
        feed(process, b"second\n")
        daemon.kill()
        daemon.start_again()
        eventually(lambda: wald("read", "a", "--root", root).stdout == b"first\nsecond\n")
        process.communicate()

    assert process.returncode == 0


def test_lines_and_objects_become_the_records_that_they_say(daemon: Daemon, root: Path) -> None:
    # The first separator ends the key.
    output_of("append", "a", "--key-separator", "::", "--root", root, stdin=b"k::v::w\nno key\n::empty\n")
    records = records_of(root)
    found = [(record.get("key"), record["value"]) for record in records]
    assert found == [("k", "v::w"), (None, "no key"), ("", "empty")]

    # Json lines carry key time headers and value.
    lines = [
        {"key": "k", "time": 1_700_000_000_000_000_001, "headers": {"h": "1"}, "value": "text"},
        {"time": "2026-11-21T10:00:00+01:00", "value": {"nested": [1, 2]}},
        {"value_hex": "00ff", "key_hex": "ff"},
        {},
    ]
    text = "\n".join(json.dumps(line) for line in lines)
    assert output_of("append", "a", "--jsonl", "--root", root, stdin=text.encode()) == b"4 7\n"
    records = records_of(root)[3:]
    assert [record.get("key", record.get("key_hex")) for record in records] == ["k", None, "ff", None]
    assert [record.get("event_time_ns") for record in records[:2]] == [
        1_700_000_000_000_000_001,
        1_795_251_600_000_000_000,
    ]
    assert not any("event_time_ns" in record for record in records[2:])
    given = [record.get("value", record.get("value_hex")) for record in records]
    assert given == ["text", '{"nested": [1, 2]}', "00ff", ""]
    assert [record.get("value_hex") for record in records] == [None, None, "00ff", None]
    assert [record.get("headers") for record in records] == [{"h": "1"}, None, None, None]

    # Json values other than strings are stored verbatim.
    texts = [
        '{"id": 12345678901234567890123, "price":1.10, "x" : 1e400, "b": 0.1000000000000000055}',
        '{"value":1,"value":[2,{"value": "\\ud800"}]}',
        *("100.00", "-0", "1E5", "true", "null"),
    ]
    objects = [f' {{ "headers": {{"value": "{{"}} , "value"\t:\r {text} , "key":"\\"value\\":" }}\r' for text in texts]
    output_of("append", "a", "--jsonl", "--root", root, stdin="\n \r\n".join(["", *objects, ""]).encode() + b"\n\n")
    assert [record["value"] for record in records_of(root)[7:]] == texts


def test_what_read_writes_as_json_append_takes(daemon: Daemon, root: Path) -> None:
    """A log can be copied record by record, including keys, times and headers."""
    line = {"key": "k", "event_time_ns": 5, "headers": {"h": "1"}, "value_hex": "00ff"}
    output_of("append", "a", "--jsonl", "--root", root, stdin=json.dumps(line).encode())
    text = output_of("read", "a", "--format", "json", "--root", root)
    output_of("append", "a", "--jsonl", "--root", root, stdin=text)
    first, second = output_of("read", "a", "--format", "json", "--root", root).splitlines()
    given = ("sequence", "append_time_ns", "sender")  # by the daemon
    assigned = {name: json.loads(second)[name] for name in given}

    assert assigned["sequence"] == 2
    assert json.loads(first) | assigned == json.loads(second)


WRONG_LINES = [
    (b"nonsense", "not JSON"),
    (b"[1]", "not a JSON object"),
    (b'{"valeu": 1}', "unknown field 'valeu'"),
    (b'{"key": 1}', "key is not a string"),
    (b'{"key_hex": "xyz"}', "key_hex is not hexadecimal"),
    (b'{"value": "", "value_hex": ""}', "are mutually exclusive"),
    (b'{"time": "noon"}', "time 'noon' is not like"),
    (b'{"time": 1.5}', "time 1.5 is not a time in ns since 1970 that fits in 64 bits"),
    (b'{"time": 9223372036854775808}', "is not a time in ns since 1970 that fits in 64 bits"),
    (b'{"headers": {"a": 1}}', "headers is not a JSON object with string values"),
    (b'{"value": "\\ud800"}', "surrogate"),
    (b'{"value": {"a": [NaN]}}', "not JSON (NaN is not a JSON value)"),
    (b'{"value": -Infinity}', "not JSON (-Infinity is not a JSON value)"),
    (b'{"value": 1, "value": 2}', "duplicate key"),
    (b'{"value": "a"', "not JSON (Expecting ',' delimiter: column 14)"),
    (b"\xff", "not JSON"),
    (b"[" * 10_000, "not JSON"),
]


def test_a_line_that_is_not_a_record_is_reported_by_number(daemon: Daemon, root: Path) -> None:
    append = ("append", "a", "--jsonl", "--root", root)
    assert refusal_of(*append, stdin=b"nonsense\n")[1].endswith("; nothing was sent")
    for number, (line, words) in enumerate(WRONG_LINES):
        code, message, hint = refusal_of(*append, stdin=b"{}\n{}\n" + line + b"\n{}\n")
        assert (code, message.startswith("stdin:3: "), words in message) == (2, True, True), message
        assert "value" in hint
        sent = f"2 records are durable (sequences {2 * number + 1} to {2 * number + 2})"
        assert message.endswith(f"; {sent} before it, and no line after it is sent")
    assert [record["value"] for record in records_of(root)] == ["", ""] * len(WRONG_LINES)


def test_a_daemon_that_is_given_up_leaves_word_of_every_record(root: Path, tmp_path: Path) -> None:
    """The message counts the durable records and those whose outcome is unknown."""
    output_of("init", "--root", root)
    output_of("route", "add", "a", "--root", root)
    (tmp_path / "lines").write_bytes(b"seven..\n" * 40_000)
    each = FRAME_MAX_BYTES // 8

    def answer(number: int, _: Publish) -> bytes:
        return {1: b"OK 1 %d\n" % each, 2: b"OK %d %d\n" % (each + 101, 2 * each + 100)}.get(number, b"")

    with Peer(tmp_path / "peer", answer):
        there = ("--root", root, "--socket", tmp_path / "peer", "--retry-for", "1s")
        code, message, hint = refusal_of("append", "a", tmp_path / "lines", *there)

    assert code == 6
    reported = f"{2 * each} records are durable (sequences 1 to {2 * each + 100})"
    assert message.endswith(f"; {reported}, {40_000 - 2 * each} are not acknowledged and may or may not be in the log")
    assert hint.endswith(f"; then wald --root {root} read a --from {2 * each + 101} shows which of them are there")


def test_it_waits_for_the_daemon_for_the_given_time(root: Path) -> None:
    """The command also waits at its start, before any daemon has run."""
    output_of("init", "--root", root)
    output_of("route", "add", "a", "--root", root)
    line = command("append", "a", "--root", root, "--retry-for", "60s")
    with launched(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as waiting:
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(2.5)  # longer than the default wait
        with Daemon(root):
            assert waiting.communicate(b"x\n", timeout=TIMEOUT_SECONDS) == (b"1 1\n", b"")


def test_an_interrupt_reports_what_is_durable(daemon: Daemon, root: Path) -> None:
    """Ctrl-C ends the command with exit code 130 and without a traceback."""
    with launched(
        command("append", "a", "--root", root), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        feed(process, b"one\n")
        eventually(lambda: wald("read", "a", "--root", root).stdout == b"one\n")
        process.send_signal(2)
        stdout, stderr = process.communicate()

    assert (process.returncode, stdout, stderr) == (130, b"1 1\n", b"")


def test_an_interrupt_waits_until_what_is_acknowledged_is_counted_and_an_ignored_one_stays_so() -> None:
    counted = []

    def count() -> None:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            counted.append(1)

    with pytest.raises(KeyboardInterrupt):
        count()
    assert counted == [1]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

    # An interrupt that is ignored stays ignored.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_interrupted_it_counts_what_is_answered_and_not_read_yet(root: Path, tmp_path: Path) -> None:
    """Unread answers that arrived while the command was sending count as durable, and the rest is reported as well."""
    output_of("init", "--root", root)
    output_of("route", "add", "a", "--root", root)
    (tmp_path / "lines").write_bytes(b"seven..\n" * 400_000)
    each = FRAME_MAX_BYTES // 8
    third, interrupted = threading.Event(), threading.Event()

    def answer(number: int, _: Publish) -> bytes:
        if number < 3:
            return b"OK %d %d\n" % ((number - 1) * each + 1, number * each)
        third.set()
        interrupted.wait(TIMEOUT_SECONDS)
        return b""

    there = ("--root", root, "--socket", tmp_path / "peer")
    with (
        Peer(tmp_path / "peer", answer),
        launched(
            command("append", "a", tmp_path / "lines", *there), stdout=subprocess.PIPE, stderr=subprocess.PIPE
        ) as process,
    ):
        try:
            assert third.wait(TIMEOUT_SECONDS)
            process.send_signal(signal.SIGINT)
            stdout, stderr = process.communicate()
        finally:
            interrupted.set()

    assert (process.returncode, stdout) == (130, b"1 %d\n" % (2 * each))
    durable = f"{2 * each} records are durable (sequences 1 to {2 * each})"
    assert re.fullmatch(
        re.escape(f"wald: interrupted; {durable}, ")
        + r"\d+ are not acknowledged and may or may not be in the log\n"
        + re.escape(f"  hint: wald --root {root} read a --from {2 * each + 1} shows which of them are there\n"),
        stderr.decode(),
    ), stderr.decode()


HOUR_NS = 3600 * 10**9


def records(root: Path) -> list[Record]:
    return list(Log(root).records("a"))


def dues(root: Path) -> list[int]:
    return [not_before(record.headers) for record in records(root)]


def at(given: str) -> int:
    """Convert a time with a zone to nanoseconds since 1970."""
    return int(datetime.fromisoformat(given).timestamp()) * 10**9


def test_a_delay_counts_from_when_a_line_is_sent(daemon: Daemon, root: Path) -> None:
    """The delay does not start with the command, which may run for days."""
    begun_ns = time.time_ns()
    line = command("append", "a", "--delay", "1h", "--root", root)
    with launched(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        feed(process, b"first\n")
        eventually(lambda: wald("read", "a", "--root", root).stdout == b"first\n")
        stdout, _ = process.communicate(b"second")
    first, second = records(root)

    assert stdout == b"1 2\n"
    assert [first.value, second.value] == [b"first", b"second"]
    assert begun_ns + HOUR_NS < not_before(first.headers) <= first.append_time_ns + HOUR_NS
    assert first.append_time_ns + HOUR_NS < not_before(second.headers) <= second.append_time_ns + HOUR_NS


def test_a_time_is_that_of_every_record(daemon: Daemon, root: Path) -> None:
    """A time in the past is stored too and delays nothing; one without a zone is local."""
    times = ("2026-11-21T10:00:00Z", "2001-09-09T01:46:40+00:00", "2262-04-11T00:00:00Z")
    for given in times:
        output_of("append", "a", "--at", given, "--root", root, stdin=b"one\ntwo\n")
    keyed = ("--key-separator", ":", "--at", times[0])
    output_of("append", "a", *keyed, "--root", root, stdin=b"k:v\nnone\n")
    assert [(record.key, record.value) for record in records(root)[6:]] == [(b"k", b"v"), (None, b"none")]
    zone = {"TZ": "Asia/Tokyo"}
    output_of("append", "a", "--at", "2026-11-21 10:00", "--root", root, stdin=b"one\n", env=zone)

    assert dues(root) == [at(given) for given in (*times, times[0]) for _ in range(2)] + [at("2026-11-21T01:00:00Z")]


def test_an_object_may_have_a_time_of_its_own(daemon: Daemon, root: Path) -> None:
    """The object's time overrides the option and the header; between those two the later one wins."""
    given = at("2026-11-21T10:00:00Z")
    objects = [
        {},
        {"not_before": 10**18},
        {"not_before": "2026-11-21T09:00:00Z", "headers": {"h": "1", NOT_BEFORE: "7"}},
        {"headers": {NOT_BEFORE: str(given - 1)}},
        {"headers": {NOT_BEFORE: str(given + 1)}},
        {"not_before": None, "headers": {"h": "2"}},
    ]
    text = "\n".join(json.dumps(each) for each in objects).encode()
    output_of("append", "a", "--jsonl", "--at", "2026-11-21T10:00:00Z", "--root", root, stdin=text)
    own = [10**18, at("2026-11-21T09:00:00Z")]

    assert dues(root) == [given, *own, given, given + 1, given]
    others = [json.loads(record.headers or b"{}").get("h") for record in records(root)]
    assert others == [None, None, "1", None, None, "2"]

    output_of("append", "a", "--jsonl", "--root", root, stdin=text)
    assert dues(root)[6:] == [0, *own, given - 1, given + 1, 0]


def test_short_lines_with_a_time_each_make_no_large_request(root: Path) -> None:
    """The requests fit the smallest limit that a daemon can be configured with."""
    lines = b"\n" * FRAME_MAX_BYTES + b"x" * FRAME_MAX_BYTES
    with Daemon(root, env={"WALD_REQUEST_MAX_BYTES": str(FRAME_MAX_BYTES + 1024)}):
        output_of("route", "add", "a", "--root", root)
        assert output_of("append", "a", "--delay", "1h", "--root", root, stdin=lines) == b"1 131073\n"

    assert output_of("read", "a", "--root", root) == lines + b"\n"
    assert 0 not in dues(root)


WRONG_OPTIONS = [
    (("--delay", "soon"), "--delay must be a duration", "--delay 30s"),
    (("--delay", "-5m"), "--delay must be a duration", "--delay 30s"),
    (("--delay", "4000d"), "--delay must be 0 to", "--delay 30s"),
    (("--at", "soon"), "--at soon: not a time", "--at 14:00, --at 2026-12-01T09:00:00+01:00"),
    (("--at", "300"), "--at 300: a number alone", "--at 14:00"),
    (("--at", "5m"), "--at 5m: counts back from now", "--delay 5m is a delay from now"),
    (("--at", "2262-04-12"), "--at 2262-04-12: after 2262-04-11T23:47:16Z", "64 bits"),
    (("--at", "14:00", "--delay", "5m"), "--delay and --at are mutually exclusive", "wald append --help"),
]


def test_no_line_is_sent_with_or_after_a_wrong_time(daemon: Daemon, root: Path) -> None:
    # No line is sent with a wrong time.
    for options, message, hint in WRONG_OPTIONS:
        code, given_message, given_hint = refusal_of("append", "a", *options, "--root", root, stdin=b"line\n")
        assert (code, given_message.startswith(message), hint in given_hint) == (2, True, True), given_message
    assert records(root) == []

    # An object with a wrong time ends the lines that are sent.
    for number, (wrong, words) in enumerate(WRONG_TIMES, 1):
        lines = b'{}\n{"not_before": %s}\n{}\n' % wrong
        code, message, _ = refusal_of("append", "a", "--jsonl", "--root", root, stdin=lines)
        assert (code, message.startswith("stdin:2: "), words in message) == (2, True, True), message
        durable = f"1 records are durable (sequences {number} to {number})"
        assert message.endswith(f"; {durable} before it, and no line after it is sent")


WRONG_TIMES = [
    (b'"soon"', "not_before 'soon' is not like 2026-11-21T10:00:00Z"),
    (b"1.5", "not_before 1.5 is not a time in ns since 1970 that fits in 64 bits"),
    (b"9223372036854775808", "is not a time in ns since 1970 that fits in 64 bits"),
    (b"1795255200", "1795255200 would be before 2001-09-09 as ns since 1970; it is probably in another unit"),
    (b"999999999999999999", "it is probably in another unit"),
    (b"0", "it is probably in another unit"),
]
