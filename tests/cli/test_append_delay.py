"""``wald append --delay`` and ``--at``: the due time of each record, and the values refused before anything is sent."""

from __future__ import annotations

import json
import subprocess
import time
from datetime import datetime
from pathlib import Path

from running import Daemon, command, eventually, feed, launched, output_of, refusal_of, wald

from wald.format.protocol import FRAME_MAX_BYTES
from wald.format.records import NOT_BEFORE, Record, not_before
from wald.log import Log

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
    zone = {"TZ": "Asia/Tokyo"}
    output_of("append", "a", "--at", "2026-11-21 10:00", "--root", root, stdin=b"one\n", env=zone)

    assert dues(root) == [at(given) for given in times for _ in range(2)] + [at("2026-11-21T01:00:00Z")]


def test_lines_with_keys_are_delayed(daemon: Daemon, root: Path) -> None:
    options = ("--key-separator", ":", "--at", "2026-11-21T10:00:00Z")
    output_of("append", "a", *options, "--root", root, stdin=b"k:v\nnone\n")

    assert [(record.key, record.value) for record in records(root)] == [(b"k", b"v"), (None, b"none")]
    assert dues(root) == [at("2026-11-21T10:00:00Z")] * 2


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


def test_no_line_is_sent_with_a_wrong_time(daemon: Daemon, root: Path) -> None:
    for options, message, hint in WRONG_OPTIONS:
        code, given_message, given_hint = refusal_of("append", "a", *options, "--root", root, stdin=b"line\n")
        assert (code, given_message.startswith(message), hint in given_hint) == (2, True, True), given_message
    assert records(root) == []


WRONG_TIMES = [
    (b'"soon"', "not_before 'soon' is not like 2026-11-21T10:00:00Z"),
    (b"1.5", "not_before 1.5 is not a time in ns since 1970 that fits in 64 bits"),
    (b"9223372036854775808", "is not a time in ns since 1970 that fits in 64 bits"),
    (
        b"1795255200",
        "not_before 1795255200 would be before 2001-09-09 as ns since 1970; it is probably in another unit",
    ),
    (b"999999999999999999", "it is probably in another unit"),
    (b"0", "it is probably in another unit"),
]


def test_an_object_with_a_wrong_time_ends_the_lines_that_are_sent(daemon: Daemon, root: Path) -> None:
    for at, (given, words) in enumerate(WRONG_TIMES, 1):
        lines = b'{}\n{"not_before": %s}\n{}\n' % given
        code, message, _ = refusal_of("append", "a", "--jsonl", "--root", root, stdin=lines)
        assert (code, message.startswith("stdin:2: "), words in message) == (2, True, True), message
        durable = f"1 records are durable (sequences {at} to {at})"
        assert message.endswith(f"; {durable} before it, and no line after it is sent")
