"""Promises to workers: leases, acknowledgements, redelivery, and their recovery by a new owner."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from leasing import cursor, group, killed, sequences, values
from logs import Built
from running import Daemon, eventually, output_of

from wald.client.producer import Producer
from wald.errors import Damaged, InvalidInput
from wald.format.log_state import PRODUCERS_MAX
from wald.format.work import JournalLine, JournalPage
from wald.work.group import WorkGroup
from wald.work.journal import read_journal
from wald.work.owner import Delivery


def test_an_invalid_sequence_fails_only_its_caller(built: Built) -> None:
    built.lines("a", [b"1"])
    with group(built) as work:
        with pytest.raises(TypeError):
            work.failed([])  # type: ignore[arg-type]
        assert sequences(work.lease("x", wait=5)) == [1]


def test_an_interrupted_lease_is_returned(built: Built) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    built.lines("a", [b"1"])
    with group(built) as work:
        with pytest.raises(KeyboardInterrupt):
            work.commit_loop.call(work.requests.lease("x", 1, 1 << 20, 600, 5, (), interrupt))
        assert sequences(work.lease("y", wait=5)) == [1]


def test_a_worker_settles_its_jobs_one_by_one(built: Built) -> None:
    built.columns("a", [b"1", b"2", b"3", b"4"], keys=[b"k", None, None, None], headers=None)
    with group(built) as work:
        seen = []
        for job in work.worker("x", lease_for=60, wait=0):
            seen.append((job.sequence, job.key, job.value, job.tries))
            match job.sequence:
                case 1:
                    assert job.ack()
                case 2:
                    assert job.nack(delay=3600)
                case 3:
                    assert job.extend(600)
                    assert [round(each.left, -1) for each in work.pending()] == [600]
                    assert job.give_up("it has teeth")
        assert seen == [(1, b"k", b"1", 1), (2, None, b"2", 1), (3, None, b"3", 1), (4, None, b"4", 1)]
        assert [each.first for each in work.pending()] == [4]


def test_a_worker_that_stops_returns_the_records_that_it_has_not_seen(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    with group(built) as work:
        for job in work.worker("x", max_records=3, wait=30):
            assert job.ack()
            break
        assert sequences(work.lease("y")) == [2, 3]
        assert tuple(job) == (job.record, job.tries)


def test_what_is_acknowledged_with_the_next_lease_never_comes_again(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3"])
    work = group(built)
    assert sequences(work.lease("x", 2, wait=5)) == [1, 2]
    assert sequences(work.lease("x", 2, done=[2])) == [3]
    assert work.lease("x", wait=0.01, done=[3]) == []
    killed(work)
    with group(built) as work:
        assert sequences(work.lease("y", wait=5)) == [1]


def test_a_lease_says_for_which_records_an_acknowledgement_with_it_did_not_count(built: Built) -> None:
    built.lines("a", [b"1", b"2", b"3", b"4"])
    with group(built) as work:
        assert sequences(work.lease("x", 2, wait=5)) == [1, 2]
        assert work.lease("x", 1).refused == ()
        for wait in (0.0, 0.01):
            got = work.lease("y", 1, wait=wait, done=[1, 4])
            assert sorted(got.refused) == [(1, "x"), *([(4, "")] if wait == 0 else [])]
            assert sequences(got) == ([4] if wait == 0 else [])


def test_what_lies_before_a_damaged_record_is_delivered(built: Built) -> None:
    late = b'{"wald.not-before":"%d"}' % (time.time_ns() + 3600 * 10**9)
    built.columns("a", [b"late"], headers=[late])
    built.lines("a", [b"2"])
    built.lines("a", [b"a damaged record"])
    (segment,) = built.root.segments.glob("*.wal")
    segment.write_bytes(segment.read_bytes().replace(b"damaged", b"DAMAGED"))
    work = group(built)
    assert values(work.lease("x", wait=5)) == [b"2"]
    with pytest.raises(Damaged):
        work.lease("x", wait=5)
    work.ack("x", [2])
    assert work.floor == 0
    segment.write_bytes(segment.read_bytes().replace(b"DAMAGED", b"damaged"))  # as if it came from a copy
    got: list[Delivery] = []

    def comes() -> bool:
        with suppress(Damaged):
            got.extend(work.lease("x", wait=5))
        return bool(got)

    eventually(comes)
    assert values(got) == [b"a damaged record"]
    killed(work)
    with group(built) as work:
        assert work.floor == 0


def test_headers_that_are_no_time_stop_no_worker(built: Built) -> None:
    built.columns("a", [b"1"], headers=[b'{"wald.not-before":"%s"}' % (b"9" * 400)])
    with group(built) as work:
        assert values(work.lease("x", wait=5)) == [b"1"]


def test_ten_thousand_in_order_leave_a_short_journal(built: Built) -> None:
    for _ in range(100):
        built.lines("a", [b"x"] * 100)
    with group(built) as work:
        left = 10_000
        while left:
            got = work.lease("x", 500, wait=5)
            work.ack("x", sequences(got))
            left -= len(got)
        assert (built.root.cursor_directory("a") / "g.work").stat().st_size <= 64 << 10
    assert cursor(built) == 10_000


def test_a_lease_of_nothing_is_refused(built: Built) -> None:
    built.lines("a", [b"1"])
    with group(built) as work:
        for consumer, count, seconds, allowed in (
            ("x", 0, 1, "max_records 0, .* must be above 0"),
            ("x", 1, 0, "lease_for 0: each must be above 0"),
            ("x", 1, -1, "lease_for -1: must be 0 or more, in seconds"),
            ("x", 1, float("nan"), "lease_for nan: must be 0 or more"),
            ("", 1, 1, "worker '': must be text of 1 to 200 printable characters"),
            ("a\nb", 1, 1, "worker 'a.*b': must be text of .* on one line"),
            ("x" * 201, 1, 1, "must be text of 1 to 200 printable characters"),
        ):
            with pytest.raises(InvalidInput, match=allowed):
                work.lease(consumer, count, lease_for=seconds)


def test_a_group_that_could_not_work_is_refused(built: Built) -> None:
    built.lines("a", [b"1"])
    options: list[dict[str, Any]] = [{"order": "keys"}, {"window": 0}, {"max_tries": 0}, {"max_tries": 255}]
    for wrong in (*options, {"dead_letter": "a/b"}):
        with pytest.raises(InvalidInput):
            WorkGroup(built.root.path, "a", "g", **wrong)


def test_what_is_being_given_up_is_not_one_more_try(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    """This holds even after a crash before the journal records that it is being given up."""
    monkeypatch.setattr("wald.work.journal._GROWN_BYTES", -(1 << 20))  # it is compacted in each round
    built.lines("a", [b"poison"])
    journal = built.root.cursor_directory("a") / "g.work"
    with WorkGroup(built.root.path, "a", "g", max_tries=1) as work:  # and no daemon
        work.lease("x", wait=5)
        work.nack("x", [1])
        assert work.lease("x") == []
        eventually(lambda: b'"dead"' in journal.read_bytes())
        lines: list[JournalLine] = []
        read_journal(journal, lines.append)
        page = next(line for line in lines if isinstance(line, JournalPage))
        assert page.tries[1] == 1


@pytest.mark.parametrize("producers", [0, PRODUCERS_MAX + 1], ids=["known to the daemon", "forgotten by it"])
def test_a_dead_letter_that_was_sent_is_not_sent_again(tmp_path: Path, producers: int) -> None:
    with Daemon(tmp_path / "log") as daemon:
        output_of("route", "add", "a", "--root", daemon.root)
        output_of("append", "a", "--root", daemon.root, stdin=b"poison\n")
        before = len(given_up(daemon.root, "it has teeth"))
        for number in range(producers):
            with Producer(daemon.root, producer_id=number + 1) as producer:
                producer.publish("a", b"other\n")
        with WorkGroup(daemon.root, "a", "g") as again:
            eventually(lambda: again.floor == 1)
        assert before > 0
        (letter,) = output_of("read", "dead_letter", "--format", "json", "--root", daemon.root).splitlines()
        assert json.loads(letter)["headers"]["wald.reason"] == "it has teeth"


def given_up(root: Path, reason: str) -> bytes:
    """Give up the first record and simulate a kill after sending its dead letter; return the unwritten lines."""
    work = WorkGroup(root, "a", "g", max_tries=1)
    work.lease("x", wait=30)
    work.nack("x", [1], reason=reason)
    killed(work)
    journal = root / "routes" / "a" / "cursors" / "g.work"
    with WorkGroup(root, "a", "g", max_tries=1) as work:
        assert work.lease("x") == []
        eventually(lambda: work.floor == 1)
        killed(work)
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.unlink()
    work.log.set_cursor("a", 0, "g", rewind=True)
    journal.write_bytes(b"".join(line for line in lines if b'"done"' not in line))
    return b"".join(line for line in lines if b'"done"' in line)
