"""CUT: always when it is due, never an empty segment, and no reader or writer loses anything by it."""

import os
import signal
import threading
from pathlib import Path

import pytest
from contents import records, values
from disturbed import invariants
from running import Client, Start, eventually
from tracing import traced

import wald
from wald.client.producer import Producer
from wald.format.names import parse_segment_name
from wald.segments.sealed_file import SealedFile


def bases(root: Path) -> list[int]:
    """The segments' base sequences, oldest first."""
    names = [parse_segment_name(name) for name in os.listdir(root / "segments")]
    return sorted({name.base_sequence for name in names if name is not None})


def test_an_idle_log_is_cut_by_age_or_request_and_an_empty_segment_never(start: Start, root: Path) -> None:
    """Otherwise two segments would have the same name; an empty segment has no age."""
    daemon = start(segment_max_age="1s", segment_age_jitter=0, routes=["a"])
    for number in (1, 2):
        for _ in range(3):
            assert daemon.ask("CUT") == f"OK nothing-to-cut {number}"
            daemon.process.send_signal(signal.SIGUSR1)
            daemon.ask("PING")
        daemon.stop()
        daemon.start_again()
        assert bases(root) == list(range(1, number + 1))
        if number == 1:
            daemon.ask("PUB a 2\nx")
            eventually(lambda: bases(root) == [1, 2])
            assert '"cuts": 1' in daemon.ask("STAT")
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB a 2\ny\nCUT\n") == "OK 2 2"
        assert client.reply() == "OK cut 3"
    assert daemon.ask("PUB a 2\nz") == "OK 3 3"
    daemon.process.send_signal(signal.SIGUSR1)
    eventually(lambda: bases(root) == [1, 2, 3, 4])
    assert values(root) == [b"x", b"y", b"z"]


def test_a_segment_is_cut_before_it_outgrows_its_size(start: Start, root: Path) -> None:
    """A record larger than a segment gets a separate one."""
    limit = 64 << 10
    daemon = start(segment_max_bytes=limit, routes=["a"])
    with Client(daemon.socket_path) as client:
        for length in [10_000] * 20 + [200_000] + [10_000] * 3:
            client.publish("a", b"x" * length + b"\n")
            assert client.reply().startswith("OK")
    eventually(lambda: '"sealed": 5,' in daemon.ask("STAT"))
    assert daemon.stop() == 0
    dumped = {entry.name: entry.stat().st_size for entry in os.scandir(root / "segments")}
    assert all(size <= limit for name, size in dumped.items() if name.endswith(".wal"))
    sizes = []
    for name in sorted(dumped):
        if name.endswith(".zst"):
            with SealedFile(root / "segments" / name) as sealed:
                sizes.append(sealed.index.raw_bytes)
    assert len([size for size in sizes if size > limit]) == 1
    assert len(records(root)) == 24


@pytest.mark.slow
def test_readers_that_follow_see_each_record_once_across_a_hundred_cuts(start: Start, root: Path) -> None:
    """Three readers, one of them of one route; the head never decreases, and everything is sealed."""
    daemon = start(routes=["a", "b"])
    log = wald.open(root)
    cancel = threading.Event()
    seen: dict[str | None, list[tuple[int, bytes]]] = {None: [], "a": [], "b": []}
    heads: list[tuple[int, int, int]] = []

    def follow(route: str | None) -> None:
        for record in log.records(route, follow=True, cancel=cancel):
            seen[route].append((record.sequence, record.value))

    def watch() -> None:
        while not cancel.is_set():
            head = log.head()
            assert head is not None
            heads.append((head.sequence, head.segment, head.position))

    threads = [threading.Thread(target=follow, args=(route,)) for route in seen] + [threading.Thread(target=watch)]
    for thread in threads:
        thread.start()
    sent: dict[str, list[bytes]] = {"a": [], "b": []}
    with Producer(root) as producer:
        for cut in range(100):
            for route in ("a", "b") if cut % 3 else ("a",):
                lines = [b"%s %d %d" % (route.encode(), cut, line) for line in range(cut % 5 + 1)]
                sent[route] += lines
                producer.publish(route, b"".join(line + b"\n" for line in lines))
            assert producer.command("CUT").startswith("cut ")
    count = len(sent["a"]) + len(sent["b"])
    eventually(lambda: len(seen[None]) == count and len(seen["a"]) + len(seen["b"]) == count)
    cancel.set()
    for thread in threads:
        thread.join()

    assert [sequence for sequence, _ in seen[None]] == list(range(1, count + 1))
    assert [value for _, value in seen["a"]] == sent["a"]
    assert [value for _, value in seen["b"]] == sent["b"]
    assert heads == sorted(heads)
    eventually(lambda: '"sealed": 100,' in daemon.ask("STAT"))
    assert values(root, "a") == sent["a"]


@pytest.mark.slow
def test_cuts_under_load_lose_nothing(start: Start, root: Path) -> None:
    """By size all the time, by signal in between, from a FIFO and from producers at once."""
    daemon = start(segment_max_bytes="64KiB", routes=["a", "pipe fifo"])
    lines = [b"%06d" % number for number in range(100_000)]

    def publish() -> None:
        with Producer(root) as producer:
            for start_ in range(0, len(lines), 500):
                producer.publish("a", b"\n".join(lines[start_ : start_ + 500]) + b"\n")
            producer.flush()

    def write() -> None:
        with (root / "routes/pipe/in").open("wb") as fifo:
            fifo.writelines(line + b"\n" for line in lines)

    threads = [threading.Thread(target=publish), threading.Thread(target=write)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        daemon.process.send_signal(signal.SIGUSR1)
        daemon.ask("PING")
    eventually(lambda: len(records(root)) == 2 * len(lines))

    assert values(root, "a") == lines
    assert values(root, "pipe") == lines
    assert len(bases(root)) >= 10


@pytest.mark.parametrize("calls", ["fdatasync", "rename,unlink,fallocate,fsync"])
def test_cuts_while_system_calls_are_slow(start: Start, root: Path, tmp_path: Path, calls: str) -> None:
    daemon = start(segment_max_bytes="64KiB")
    pid = daemon.process.pid
    daemon.ask("ROUTE ADD a")
    sent: dict[int, bytes] = {}
    expressions = (f"trace={calls}", f"inject={calls}:delay_enter=30000")
    with Client(daemon.socket_path) as client, traced(pid, tmp_path / "trace", *expressions, threads=True) as trace:
        for cut in range(6):
            for line in range(2):
                value = b"%d.%d" % (cut, line)
                _, sequence, _ = client.ask(b"PUB a %d\n%s\n" % (len(value) + 1, value)).split()
                sent[int(sequence)] = value
            assert client.ask(b"CUT\n").startswith("OK cut")
            assert invariants(pid, root) == []
        trace.release()
        assert client.ask(b"PUB a 4\nend\n") == f"OK {len(sent) + 1} {len(sent) + 1}"
    assert {record.sequence: record.value for record in records(root)} == sent | {len(sent) + 1: b"end"}
    assert daemon.stop() == 0
    assert [name for name in os.listdir(root / "segments") if name.endswith(".tmp")] == []


def test_a_long_line_may_span_many_cuts(start: Start, root: Path) -> None:
    """Its pieces lie in several segments; a restart in the middle changes nothing."""
    daemon = start(segment_max_bytes="256KiB", routes=["a fifo", "b"])
    parts = [bytes([ord("a") + number]) * 700_000 for number in range(6)]
    holder = os.open(root / "routes/a/in", os.O_RDWR)
    with (root / "routes/a/in").open("wb", buffering=0) as fifo:
        for number, part in enumerate(parts):
            fifo.write(part)
            daemon.ask("PUB b 2\nx")  # so that there is something to cut
            daemon.ask("CUT")
            if number % 2:
                daemon.kill()
                daemon.start_again()
        fifo.write(b"\n")
    eventually(lambda: values(root, "a") == [b"".join(parts)])
    assert len(bases(root)) >= 6
    os.close(holder)
