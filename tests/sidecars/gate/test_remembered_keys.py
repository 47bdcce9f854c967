"""Remembered idempotency keys: they survive reclaim, and the log wins over a wrong table."""

import errno
import http.client
import os
import shutil
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event, Thread

import pytest
from contents import values
from copied_back import copy, copy_back
from gating import NDJSON, ORDERS, Gate
from repeating import keys_of_slot, outcome, release, send
from running import Daemon, eventually, output_of, reclaim
from tracing import traced

import wald as library
from wald.files.disk import Disk
from wald_gate.records_in import keys

PARTS = b"".join(b"line %084d\n" % number for number in range(10_000))  # about nine parts


def table(root: Path) -> Path:
    return root / "gate/keys.log"


def take_away(root: Path) -> None:
    shutil.rmtree(table(root).parent)


def change(root: Path, at: int) -> None:
    content = bytearray(table(root).read_bytes())
    content[at] ^= 1
    table(root).write_bytes(content)


def forbid(root: Path) -> None:
    take_away(root)
    table(root).parent.write_bytes(b"")


SPOILED: list[Callable[[Path], object]] = [
    take_away,
    lambda root: os.truncate(table(root), table(root).stat().st_size - 100),
    lambda root: table(root).write_bytes(b"nonsense" * (table(root).stat().st_size // 8)),
    lambda root: change(root, len(b"wald keys, version 1\n")),  # of another log
    lambda root: change(root, len(b"wald keys, version")),  # of an older format
    lambda root: change(root, 72 + 20),  # an entry
    forbid,
]


@pytest.mark.parametrize("end", [Gate.kill, pytest.param(Gate.stop, marks=pytest.mark.slow)])
def test_without_its_table_a_key_is_found_in_the_log(gate: Gate, root: Path, end: Callable[[Gate], None]) -> None:
    for number in range(300):  # more than the gate reads, and saves in the table, at once
        gate.post(ORDERS, b"%d" % number)
    first = send(gate, "k", PARTS)
    for spoil in SPOILED:
        assert table(root).exists()
        end(gate)
        spoil(root)
        gate.start()

        assert outcome(send(gate, "k", PARTS)) == (200, True, first.body)
        assert len(values(root, "orders")) == 10_300
    assert "Traceback" not in gate.log


def test_a_log_that_could_not_be_read_at_first_leaves_the_table_to_no_other_gate(
    gate: Gate, daemon: Daemon, root: Path
) -> None:
    gate.post(ORDERS, b"first\n")
    head = root / "head"
    whole = head.read_bytes()
    head.write_bytes(b"?" * len(whole))
    assert send(gate, "k", b"one\n").status == 500
    head.write_bytes(whole)

    assert send(gate, "k", b"one\n").status == 200
    assert "another gate has locked it" not in gate.log
    assert table(root).stat().st_size >= 2 * 72


@pytest.mark.parametrize("end", [Gate.kill, Gate.stop])
def test_a_key_outlives_its_records_and_a_restart(
    gate: Gate, daemon: Daemon, root: Path, end: Callable[[Gate], None]
) -> None:
    first = send(gate, "k", PARTS)
    release(daemon)
    assert outcome(send(gate, "k", PARTS)) == (200, True, first.body)
    end(gate)
    gate.start()

    assert values(root, "orders") == []
    assert outcome(send(gate, "k", PARTS)) == (200, True, first.body)
    assert send(gate, "k", b"other\n").status == 422
    assert send(gate, "new").json()["first"] == 10_001


def test_a_key_whose_records_and_table_are_gone_is_new(gate: Gate, daemon: Daemon, root: Path) -> None:
    """Its slot continues with the next number, which only the newest segment has."""
    send(gate, "k", b"x\n")
    release(daemon)
    gate.stop()
    take_away(root)
    gate.start()

    assert outcome(send(gate, "k", b"x\n")) == (200, False, b'{"first":2,"last":2,"count":1}')


def test_a_key_that_is_forgotten_in_part_is_refused(root: Path) -> None:
    """Its first parts are reclaimed and the table is lost; they are not stored again after the last ones."""
    with Daemon(root, env={"WALD_SEGMENT_MAX_BYTES": "256KiB"}) as daemon, Gate(root) as gate:
        daemon.ask("ROUTE ADD orders")
        send(gate, "k", PARTS)
        library.open(root).set_cursor("orders", 5_000)
        reclaim(root, "--grace", "0")
        left = values(root, "orders")
        gate.stop()
        take_away(root)
        gate.start()

        answer = send(gate, "k", PARTS)

        assert (answer.status, answer.json()["code"]) == (409, "forgotten")
        assert values(root, "orders") == left
        assert 5_000 <= len(left) < 10_000


def test_a_damaged_entry_costs_no_other_key(gate: Gate, daemon: Daemon, root: Path) -> None:
    """The keys before and after the damaged entry are remembered after their records are deleted."""
    bodies = [send(gate, key).body for key in "abc"]
    release(daemon)
    gate.stop()
    content = table(root).read_bytes()
    entries = [start for start in range(72, len(content), 72) if any(content[start : start + 16])]
    assert len(entries) == 3
    change(root, entries[1] + 20)
    for _ in range(2):
        gate.start()
        assert outcome(send(gate, "a")) == (200, True, bodies[0])
        assert outcome(send(gate, "c")) == (200, True, bodies[2])
        gate.stop()
    gate.start()
    assert outcome(send(gate, "b")) == (200, False, b'{"first":7,"last":8,"count":2}')


def test_the_file_is_replaced_once_it_is_twice_as_long_as_needed(
    daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_SPARE_ENTRIES", 10)
    monkeypatch.setattr(keys, "KEPT_PARTS", 5)
    log = library.open(root)
    parts = {number: keys.Part(number, number, bytes(16)) for number in range(1, 4)}
    store = keys.KeyStore(log, Event())
    with library.Producer(root) as producer:
        for number in range(50):
            store.add(b"%016d" % number, parts)
            store.save()
            producer.send("orders", ["x"]).result()
            store.read_portion()
            assert table(root).stat().st_size < 72 * 40
    store.close()
    store = keys.KeyStore(log, Event())
    assert [number for number in range(50) if store.parts(b"%016d" % number)] == [48, 49]
    assert store.parts(b"%016d" % 49) == parts
    store.close()


def test_no_position_is_saved_without_the_keys_before_it(
    daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other thread reads the log while a key is being added, and a kill follows."""
    log = library.open(root)
    parts = {1: keys.Part(1, 1, bytes(16))}
    store = keys.KeyStore(log, Event())

    def read() -> None:
        store.add(bytes(16), parts)
        store.read_portion()

    class Unsaved(deque[keys.Entry]):
        def append(self, entry: keys.Entry) -> None:
            if reading.ident is None:  # the part is in the table, and not here yet
                reading.start()
                reading.join(0.3)
            super().append(entry)

    reading = Thread(target=read)
    with library.Producer(root) as producer:
        producer.send("orders", ["x"]).result()
    monkeypatch.setattr(store, "_unsaved", Unsaved())
    store.add(bytes(16), parts)
    reading.join()
    store.close()
    store = keys.KeyStore(log, Event())
    assert store.parts(bytes(16)) == parts
    store.close()


def test_a_replaced_file_is_written_even_if_the_directory_cannot_be_synced(
    daemon: Daemon, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    file = keys.KeyFile(library.open(root))
    entry = keys.Entry(bytes(16), 1, 1, 1, bytes(16), 1, 1)
    file.append([entry])
    for step, number in (("sync_directory", 2), ("rename", 3)):
        with monkeypatch.context() as patch:
            patch.setattr(Disk, step, fail)
            file.replace([entry])
        file.append([entry])
        assert table(root).stat().st_size == (1 + number) * 72
    file.close()


def test_the_parts_of_a_key_are_found_in_whatever_order_they_were_added(daemon: Daemon, root: Path) -> None:
    store = keys.KeyStore(library.open(root), Event())
    for number in (3, 1, 5, 4, 2, 3, 7):
        store.add(bytes(16), {number: keys.Part(number, number, bytes(16))})

    assert list(store.parts(bytes(16))) == [1, 2, 3, 4, 5, 7]
    assert store.count == 6
    store.close()


def test_a_log_that_is_copied_back_has_not_what_came_after_the_copy(
    gate: Gate, daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    """The gate's table remembers keys that the restored log no longer has."""
    kept = send(gate, "kept")
    copy(daemon, root, tmp_path / "copy")
    lost = send(gate, "lost", b"three\n")
    gate.stop()
    copy_back(daemon, root, tmp_path / "copy")
    gate.start()

    assert outcome(send(gate, "lost", b"three\n")) == (200, False, lost.body)
    assert outcome(send(gate, "kept")) == (200, True, kept.body)
    assert values(root, "orders") == [b"one", b"two", b"three"]


def test_a_table_of_another_past_of_the_log_is_not_believed(
    gate: Gate, daemon: Daemon, root: Path, tmp_path: Path
) -> None:
    send(gate, "kept")
    copy(daemon, root, tmp_path / "copy")
    lost = [send(gate, f"lost-{number}").body for number in range(3)]
    gate.stop()
    gate.start()
    assert outcome(send(gate, "lost-2")) == (200, True, lost[2])  # so the table covers the log to its end
    gate.stop()
    shutil.copytree(root / "gate", tmp_path / "table")
    copy_back(daemon, root, tmp_path / "copy")
    gate.start()
    bodies = [send(gate, f"new-{number}", b"%d\n" % number * 3).body for number in range(4)]
    gate.stop()
    take_away(root)
    shutil.copytree(tmp_path / "table", root / "gate")
    gate.start()

    for number, body in enumerate(bodies):
        assert outcome(send(gate, f"new-{number}", b"%d\n" % number * 3)) == (200, True, body)
    assert outcome(send(gate, "lost-0"))[:2] == (200, False)
    assert len(values(root, "orders")) == 2 + 4 * 3 + 2


def test_a_body_that_was_stored_in_part_is_completed(gate: Gate, root: Path) -> None:
    """The client disconnects in the middle of the body."""
    asked = f"POST {ORDERS}", "Idempotency-Key: k"
    connection = gate.begin(*asked, body=PARTS[:600_000], more=len(PARTS) - 600_000)
    eventually(lambda: values(root, "orders"))
    busy = send(gate, "k", PARTS)
    assert (busy.status, busy.json()["code"], busy.headers["retry-after"]) == (409, "under-way", "1")
    connection.close()
    while (answer := send(gate, "k", PARTS)).status == 409:
        pass

    assert outcome(answer) == (200, False, b'{"first":1,"last":10000,"count":10000}')
    assert b"".join(value + b"\n" for value in values(root, "orders")) == PARTS


@pytest.mark.parametrize("when", [1, 3, 8])
def test_a_body_is_completed_after_a_kill_at_the_nth_sync(
    gate: Gate, daemon: Daemon, root: Path, tmp_path: Path, when: int
) -> None:
    """The daemon dies before a sync, and then the gate dies."""
    with traced(daemon.process.pid, tmp_path / "calls", f"inject=fdatasync:signal=KILL:when={when}"):
        with ThreadPoolExecutor() as threads:
            lost = threads.submit(send, gate, "k", PARTS)
            daemon.process.wait()
            gate.kill()
        assert isinstance(lost.exception(), ConnectionError)
    daemon.start_again()
    gate.start()

    assert send(gate, "k", PARTS).json()["count"] == 10_000
    assert b"".join(value + b"\n" for value in values(root, "orders")) == PARTS


def test_a_slot_goes_on_behind_a_number_that_only_the_state_of_the_log_has(
    gate: Gate, daemon: Daemon, root: Path
) -> None:
    """Its last batch is reclaimed, but an older one is not, because another group has not read that route."""
    daemon.ask("ROUTE ADD others")
    in_orders, in_others = keys_of_slot(7), keys_of_slot(7, "others")
    older = send(gate, next(in_others), b"x", path="/v1/routes/others/records")
    assert daemon.ask("CUT").startswith("OK cut")
    send(gate, next(in_orders))
    send(gate, next(in_orders))
    release(daemon)
    gate.stop()
    take_away(root)
    gate.start()

    assert older.json()["first"] == 1
    assert values(root, "orders") == []
    assert send(gate, next(in_orders)).json() == {"first": 6, "last": 7, "count": 2}


def test_a_mark_of_a_producer_is_not_believed(gate: Gate, root: Path) -> None:
    """Records read with their headers may be stored again; those headers do not register keys."""
    first = send(gate, "k", b'{"value": "a"}\n', NDJSON)
    copied = gate.get(ORDERS).body
    gate.post(ORDERS, copied, NDJSON)
    gate.stop()
    take_away(root)
    gate.start()

    assert outcome(send(gate, "k", b'{"value": "a"}\n', NDJSON)) == (200, True, first.body)
    assert send(gate, "copy", copied, NDJSON).json()["count"] == 1


NEW = [b"new %d\n" % number for number in range(9)]


def another_log(daemon: Daemon, root: Path) -> None:
    daemon.stop()
    root.rename(root.with_name("old"))
    daemon.start_again()
    output_of("route", "add", "--root", root, "orders")


def older_copy(daemon: Daemon, root: Path) -> None:
    copy_back(daemon, root, root.with_name("copy"))


@pytest.mark.parametrize(
    ("replace", "sentence"),
    [(another_log, "the log was replaced by another log"), (older_copy, "the log was replaced by an older copy")],
)
def test_nothing_of_the_log_that_was_there_is_answered(
    gate: Gate, daemon: Daemon, root: Path, replace: Callable[[Daemon, Path], None], sentence: str
) -> None:
    gate.post(ORDERS, b"kept\n")
    gate.make_group("billing")
    copy(daemon, root, root.with_name("copy"))
    send(gate, "k", b"lost 2\nlost 3\n")
    left = 2
    while left:  # a lease may return only the records read ahead so far
        left -= len(gate.leased(max_records=left, wait=30))
    with gate.asked("GET", f"{ORDERS}?from=2&follow=1&format=raw") as following:
        assert following.read(len(b"lost 2\nlost 3\n")) == b"lost 2\nlost 3\n"
        replace(daemon, root)
        output_of("append", "--root", root, "orders", stdin=b"".join(NEW))
        with pytest.raises((http.client.IncompleteRead, ConnectionResetError)):
            following.read()

    for answer in (
        gate.work("lease"),
        gate.work("ack", sequences=[1, 2]),
        gate.post(ORDERS, b"x\n"),
        gate.get("/v1/head"),
    ):
        assert (answer.status, answer.json()["code"]) == (503, "replaced"), answer.body
        assert "verify" not in answer.json()["hint"]
    eventually(lambda: gate.get("/v1/routes").status == 503)  # without reads, the gate checks the log twice a second
    eventually(lambda: send(gate, "k", b"lost 2\nlost 3\n").status == 503)
    eventually(lambda: gate.get("/readyz").status == 503)
    assert gate.get("/readyz").json()["detail"] == sentence
    assert gate.get("/healthz").status == 200

    gate.stop()
    gate.start()
    there = output_of("read", "--root", root, "orders")
    assert there.endswith(b"".join(NEW))
    assert b"x\n" not in there.splitlines(keepends=True)
    assert gate.get(f"{ORDERS}?format=raw").body == there
    assert send(gate, "k", b"lost 2\nlost 3\n").json()["first"] == len(there.splitlines()) + 1
