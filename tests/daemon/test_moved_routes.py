"""A renamed or merged route: its writers do not notice, every record is stored once, and no group misses one."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from contents import assert_sound, records, values
from running import Client, Daemon, eventually, launched, output_of, reclaim, refusal_of, sidecar
from running import wald as wald_of
from tracing import traced

import wald

Start = Callable[..., Daemon]
LARGE = 600 << 10  # more than is kept of a request in memory, and more than a chunk of a pipe


def written(path: Path, stop: threading.Event) -> list[bytes]:
    """Write lines to a FIFO until ``stop``; returns them."""
    lines: list[bytes] = []
    with path.open("wb", buffering=0) as fifo:
        while not stop.wait(0.001):  # as fast as a reader can follow
            lines.append(b"fifo %d" % len(lines))
            fifo.write(lines[-1] + b"\n")
    return lines


def sent(root: Path, stop: threading.Event) -> list[bytes]:
    """Send records to the route a until ``stop``; returns them when they are durable."""
    lines: list[bytes] = []
    with wald.Producer(root) as producer:
        while not stop.wait(0.001):  # as fast as a reader can follow
            lines.append(b"sent %d" % len(lines))
            producer.send("a", [lines[-1]])
    return lines


def test_writers_go_on_and_every_record_is_stored_once(start: Start, root: Path) -> None:
    start()
    output_of("route", "add", "a", "--fifo", "--root", root)
    output_of("cursor", "set", "a", 0, "--root", root)
    found: list[list[bytes]] = [[], []]
    stop = threading.Event()
    writers = [
        threading.Thread(target=lambda: found.__setitem__(0, written(root / "routes/a/in", stop))),
        threading.Thread(target=lambda: found.__setitem__(1, sent(root, stop))),
    ]
    for writer in writers:
        writer.start()
    eventually(lambda: len(values(root, "a")) > 50)
    said = output_of("route", "rename", "a", "b", "--root", root).decode()
    eventually(lambda: len(values(root, "b")) > 50)
    output_of("route", "add", "c", "--root", root)
    output_of("route", "merge", "b", "c", "--root", root)
    eventually(lambda: len(values(root, "c")) > 50)
    stop.set()
    for writer in writers:
        writer.join()

    eventually(lambda: len(values(root)) == len(found[0]) + len(found[1]))
    stored = values(root)
    assert [value for value in stored if value.startswith(b"fifo")] == found[0]
    assert [value for value in stored if value.startswith(b"sent")] == found[1]
    after = records(root, "a")[-1].sequence
    assert after <= int(said.split()[3]) < records(root, "b")[0].sequence
    assert records(root, "b")[-1].sequence < records(root, "c")[0].sequence
    assert wald.open(root).cursor("b").sequence == int(said.split()[3])
    assert_sound(root)


@pytest.mark.parametrize("calls", ["mkdirat:when=1", "rename:when=1", "rename:when=2", "rename:when=3", "fsync:when=5"])
def test_killed_between_any_two_steps(start: Start, root: Path, tmp_path: Path, calls: str) -> None:
    """Directory, a cursor, another, the mark, its sync: the same command completes it, and no group misses a record."""
    daemon = start()
    assert daemon.ask("ROUTE ADD a fifo") == "OK added a"
    for group in ("one", "two"):
        wald.open(root).set_cursor("a", 0, group)
    held = os.open(root / "routes/a/in", os.O_RDWR)
    name, _, when = calls.partition(":")
    with traced(daemon.process.pid, tmp_path / "trace", f"trace={name}", f"inject={name}:signal=SIGKILL:{when}"):
        assert daemon.ask("ROUTE MOVE a b") == ""
        assert daemon.wait() == -9
    os.write(held, b"tick\n")
    daemon.start_again()
    eventually(lambda: values(root) == [b"tick"])
    output_of("route", "rename", "a", "b", "--root", root)
    os.write(held, b"tock\n")
    eventually(lambda: values(root, "b")[-1:] == [b"tock"])
    os.close(held)

    assert values(root) == [b"tick", b"tock"]
    assert values(root, "a") == ([] if name == "fsync" else [b"tick"])
    first = records(root, "b")[0].sequence
    assert [wald.open(root).cursor("b", group).sequence < first for group in ("one", "two")] == [True, True]
    assert wald.open(root).root.groups("b") == ["one", "two"]
    assert_sound(root)


def test_a_repeated_request_is_recognised_under_the_old_name(start: Start, root: Path) -> None:
    daemon = start()
    requests = [b"PUB a %d pid=5 pseq=%d\n%b" % (len(payload), number, payload) for number, payload in payloads()]
    with Client(daemon.socket_path) as client:
        assert client.ask(b"ROUTE ADD a\n") == "OK added a"
        stored = [client.ask(request) for request in requests]
        assert client.ask(b"ROUTE MOVE a b\n") == f"OK moved a b {len(requests)}"
        assert [client.ask(request) for request in requests] == stored
        assert client.ask(b"PUB a 6 pid=5 pseq=2\nother\n").startswith("ERR conflict")
        assert client.ask(b"PUB a 4 pid=5 pseq=3\nnew\n") == "OK 3 3"
    assert values(root, "b") == [b"new"]


def payloads() -> list[tuple[int, bytes]]:
    return [(1, b"small\n"), (2, b"x" * LARGE + b"\n")]


def test_a_half_sent_request_is_stored_where_the_route_was_moved(start: Start, root: Path) -> None:
    daemon = start()
    payload = b"y" * LARGE + b"\n"
    with Client(daemon.socket_path) as client:
        assert client.ask(b"ROUTE ADD a\n") == "OK added a"
        client.send(b"PUB a %d\n" % len(payload) + payload[: LARGE // 2])
        eventually(lambda: any(".tmp" in name or "#" in name for name in descriptors(daemon)))
        assert daemon.ask("ROUTE MOVE a b") == "OK moved a b 0"
        assert client.ask(payload[LARGE // 2 :]) == "OK 1 1"
    assert (values(root, "a"), values(root, "b")) == ([], [payload[:-1]])
    assert_sound(root)


def descriptors(daemon: Daemon) -> list[str]:
    """What the daemon has open."""
    folder = f"/proc/{daemon.process.pid}/fd"
    return [os.readlink(f"{folder}/{each}") for each in os.listdir(folder)]


@pytest.mark.parametrize(("inside", "other"), [("a", "b"), ("b", "a")])
def test_two_fifos_of_a_merged_route_do_not_mix_their_long_lines(
    start: Start, root: Path, inside: str, other: str
) -> None:
    """One is inside a line that is longer than a pipe holds, and the daemon is killed there: the other still waits."""
    daemon = start()
    for route in ("a", "b"):
        output_of("route", "add", route, "--fifo", "--root", root)
    held = {route: os.open(root / "routes" / route / "in", os.O_RDWR) for route in ("a", "b")}
    output_of("route", "merge", "a", "b", "--root", root)
    halves = [b"0" * LARGE, b"1" * LARGE]
    os.write(held[inside], halves[0])  # more than a chunk, so a piece of it is in the log
    eventually(lambda: daemon.ask("ROUTE MOVE b c").startswith("ERR busy"))
    os.write(held[other], b"tick\n")
    daemon.kill()
    daemon.start_again()
    os.write(held[inside], halves[1] + b"\n")
    eventually(lambda: len(values(root)) == 2)
    for descriptor in held.values():
        os.close(descriptor)
    assert values(root, "b") == [b"".join(halves), b"tick"]
    assert_sound(root)


def test_records_stay_until_the_groups_have_read_both(start: Start, root: Path) -> None:
    daemon = start()
    at = ("--root", root)
    output_of("route", "add", "a", *at)
    output_of("append", "a", *at, stdin=b"one\n")
    output_of("cursor", "set", "a", 0, *at)
    output_of("route", "rename", "a", "b", *at)
    output_of("append", "a", *at, stdin=b"two\n")
    assert daemon.ask("CUT").startswith("OK cut")

    def kept() -> int:
        reclaim(root, "--grace", 0)
        return len(values(root))

    assert kept() == 2
    output_of("cursor", "set", "a", 1, *at)
    assert kept() == 2
    output_of("cursor", "set", "b", 2, *at)
    eventually(lambda: kept() == 0)  # the sealer may be at work on it


def test_what_cannot_be_moved_is_refused(start: Start, root: Path) -> None:
    start()
    at = ("--root", root)
    for route in ("a", "b", "gone"):
        output_of("route", "add", route, *at)
        output_of("append", route, *at, stdin=b"x\n")
    output_of("route", "retire", "gone", *at)
    assert refusal_of("route", "rename", "a", "b", *at)[:2] == (9, "b has records")
    assert refusal_of("route", "rename", "a", "gone", *at)[:2] == (9, "gone is retired")
    assert refusal_of("route", "merge", "a", "a", *at)[0] == 9
    assert refusal_of("route", "merge", "a", "none", *at)[0] == 3
    assert refusal_of("route", "rename", "none", "c", *at)[0] == 3
    assert refusal_of("route", "rename", "a", ".c", *at)[0] == 2
    output_of("route", "merge", "a", "b", *at)
    assert refusal_of("route", "merge", "b", "a", *at)[:2] == (9, "a was moved to b")
    assert refusal_of("route", "rename", "a", "c", *at)[:2] == (9, "a was moved to b")
    assert refusal_of("route", "retire", "b", *at)[:2] == (9, "what is sent to a is stored in b")
    output_of("route", "retire", "a", *at)
    output_of("route", "add", "a", *at)
    output_of("append", "a", *at, stdin=b"back\n")
    assert values(root, "a") == [b"x", b"back"]


def test_writers_of_the_settings_stay_in_force(start: Start, root: Path, tmp_path: Path) -> None:
    config = tmp_path / "wald.toml"
    config.write_text(f"[routes.a]\nwriters = [{os.geteuid()}]\n")
    daemon = start("--config", config)
    assert daemon.ask("ROUTE MOVE a b") == "ERR denied the settings have other writers for b than for a"
    assert daemon.ask("ROUTE ADD b") == "OK added b"
    assert daemon.ask("ROUTE MOVE b a").startswith("ERR denied")


def test_without_a_daemon(start: Start, root: Path) -> None:
    daemon = start()
    at = ("--root", root)
    output_of("route", "add", "a", "--fifo", *at)
    output_of("append", "a", *at, stdin=b"one\n")
    assert daemon.stop() == 0
    assert output_of("route", "rename", "a", "b", *at) == b"a: records behind 1 go to b\n"
    daemon.start_again()
    with (root / "routes/a/in").open("wb") as fifo:
        fifo.write(b"two\n")
    output_of("append", "a", *at, stdin=b"three\n")
    eventually(lambda: sorted(values(root, "b")) == [b"three", b"two"])
    assert values(root, "a") == [b"one"]


def test_readers_and_lists_say_where_it_went(start: Start, root: Path) -> None:
    start()
    at = ("--root", root)
    output_of("route", "add", "a", *at)
    output_of("append", "a", *at, stdin=b"one\n")
    output_of("route", "rename", "a", "b", *at)
    done = wald_of("read", "a", *at)
    assert (done.stdout, b"what was sent to it after record 1 is in b" in done.stderr) == (b"one\n", True)
    assert b"moved to b" in output_of("routes", *at)
    assert b"is in b" in output_of("cursor", "show", "a", *at)


def test_status_explain_and_drain_say_where_a_route_was_moved(start: Start, root: Path) -> None:
    """Drain says it once, when it has processed all there is; the command that it names goes on."""
    daemon = start()
    assert daemon.ask("ROUTE ADD a") == "OK added a"
    with Client(daemon.socket_path) as client:
        client.publish("a", b"1\n")
        assert client.reply() == "OK 1 1"
    words = [*sidecar("drain", "--root", root, "a"), "--", "sh", "-c", "cat > /dev/null"]
    with launched(words, stderr=subprocess.PIPE) as drain:
        eventually(lambda: wald.open(root).cursor("a").effective == 1)
        output_of("route", "rename", "a", "b", "--root", root)
        assert drain.stderr is not None
        said = [drain.stderr.readline().decode(), drain.stderr.readline().decode()]
        drain.terminate()
        assert drain.stderr.read() == b""
    told = "a was moved: what was sent to it after record 1 is in b"
    typed = f"wald-drain --root {root} feed b --group processed -- sh -c 'cat > /dev/null'"
    assert said == [f"wald-drain: {told}\n", f"  hint: {typed}\n"]
    assert f"{told}." in output_of("explain", "--root", root).decode().splitlines()
    assert "moved       a to b after record 1" in output_of("status", "--root", root).decode().splitlines()
    assert daemon.ask("ROUTE RETIRE a") == "OK retired a"
    assert "moved" not in (output_of("explain", "--root", root) + output_of("status", "--root", root)).decode()
