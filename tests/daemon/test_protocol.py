"""The socket protocol from outside: refusals, the order of replies, repeated requests, and senders of records."""

import json
import os
import signal
import struct
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import pytest
from asking import REQUEST_MAX, SPOOLED, sequence, stat, written
from contents import records, text, values
from running import Client, Daemon, Start, command, eventually
from users import acting_as

import wald
from wald.format.log_state import PRODUCERS_MAX
from wald.format.records import PREFIX, encode_columns


def offsets(*ends: int, data: bytes = b"") -> bytes:
    """A payload of columns whose only column, values, has these offsets."""
    packed = struct.pack(f"<{len(ends)}i", *ends)
    body = b"".join(part + bytes(-len(part) % 8) for part in (packed, data))
    return PREFIX.pack(len(ends) - 1, 0) + body


def columns(payload: bytes) -> bytes:
    return b"PUB r %d enc=columns\n%b" % (len(payload), payload)


WRONG_COMMANDS = (
    *(b"PING twice", b"HEAD r", b"CUT now", b"ROUTE", b"ROUTE ADD", b"ROUTE DROP r", b"ROUTE RETIRE r now"),
    *(b"ROUTE ADD x exec", b"ROUTE ADD x mode=", b"ROUTE ADD x fifo mode=9"),
)
REFUSED = [
    (b"GET / HTTP/1.1\n", "unknown-verb"),
    (b"\xff\xfe\n", "unknown-verb"),
    *((b"%b\n" % line, "bad-request") for line in WRONG_COMMANDS),
    (b"ROUTE ADD ../x\n", "bad-route"),
    (b"ROUTE ADD \xff\n", "bad-route"),
    (b"ROUTE RETIRE ../r\n", "bad-route"),
    (b"ROUTE RETIRE absent\n", "no-route"),
    (b"PUB .. 2\nx\n", "bad-route"),
    (b"PUB a\0b 2\nx\n", "bad-route"),
    (b"PUB gone 2\nx\n", "no-route"),
    (b"PUB absent %d\n%b" % (SPOOLED, bytes(SPOOLED)), "no-route"),
    (b"PUB r 0\n", "bad-lines"),
    (b"PUB r 3\na\nb", "bad-lines"),
    (b"PUB r %d\n%b" % (SPOOLED, bytes(SPOOLED)), "bad-lines"),
    (b"PUB r %d\n%b" % (REQUEST_MAX + 1, b"\n" * (REQUEST_MAX + 1)), "too-large"),
    (b"PUB r 2 enc=rows\nx\n", "bad-request"),
    (b"PUB r 2 pid=0 pseq=1\nx\n", "bad-request"),
]


def test_a_bad_request_is_refused_alone_and_one_without_a_known_end_is_the_last(shared: Daemon, client: Client) -> None:
    # A bad request is refused alone: it gets its code, nothing is written, and later requests are answered.
    before = written(shared.root)
    for request_bytes, code in REFUSED:
        assert client.ask(request_bytes + b"PING\n").split(" ")[:2] == ["ERR", code], request_bytes[:40]
        assert client.reply() == "OK pong"
    assert written(shared.root) == before

    # Malformed columns are refused: in memory and spooled, with the reason.
    for payload, message in [
        (b"", "the payload is too short for the count of records"),
        (encode_columns([]), "the payload contains no records"),
        (PREFIX.pack(1 << 31, 0), "8 bytes cannot hold 2147483648 records"),
        (offsets(0, 2, 1, data=b"ab"), "the offsets do not start at 0 or are not sorted"),
        (offsets(0, SPOOLED, 1, data=bytes(SPOOLED)), "the offsets do not start at 0 or are not sorted"),
        (offsets(0, SPOOLED - 9, data=bytes(SPOOLED)), "8 bytes follow the last column"),
    ]:
        assert client.ask(columns(payload) + b"PING\n") == f"ERR bad-columns {message}"
        assert client.reply() == "OK pong"
    assert written(shared.root) == before

    # A request without a known end is the last.
    for request_bytes, code in ((b"PUB r -2\nx\n", "bad-length"), (b"PUB r" + b" " * 1024, "bad-request")):
        with Client(shared.socket_path) as other:
            assert other.ask(request_bytes + b"ROUTE ADD behind\n").split(" ")[:2] == ["ERR", code]
            assert other.reply() == ""
    assert written(shared.root) == before


def test_a_route_can_be_used_behind_its_making_and_is_refused_while_it_is_retired(
    shared: Daemon, client: Client, route: str
) -> None:
    # Within one write, each request sees the effects of earlier ones.
    publish = f"PUB {route} 2\nx\n".encode()
    client.send(publish + b"ROUTE RETIRE %b\n" % route.encode())
    client.send(publish + b"ROUTE ADD %b\n" % route.encode() + publish)
    replies = [client.reply().split(" ") for _ in range(5)]
    assert [each[:2] for each in replies[1::2]] == [["OK", "retired"], ["OK", "added"]]
    assert [each[0] for each in replies[0::2]] == ["OK", "ERR", "OK"]
    assert replies[2][1] == "no-route"
    client.send(b"ROUTE ADD fresh\nPUB fresh 2\nx\nROUTE ADD fresh fifo mode=0600\n")
    assert [client.reply().split()[0] for _ in range(3)] == ["OK"] * 3
    assert values(shared.root, "fresh") == [b"x"]
    assert (shared.root / "routes/fresh/in").stat().st_mode & 0o7777 == 0o600

    # A route is retired while a large payload arrives.
    payload = b"y" * SPOOLED + b"\n"
    client.send(b"PUB %b %d\n" % (route.encode(), len(payload)) + payload[:-1])
    eventually(lambda: has_file_without_a_name(shared))
    assert shared.ask(f"ROUTE RETIRE {route}") == f"OK retired {route}"
    assert client.ask(payload[-1:]).startswith("ERR no-route ")
    assert values(shared.root, route) == [b"x"] * 2


def has_file_without_a_name(daemon: Daemon) -> bool:
    """Return True if the daemon has begun to gather a large payload."""
    for each in Path(f"/proc/{daemon.process.pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since
            if "/#" in os.readlink(each):
                return True
    return False


def test_what_asks_about_the_log_sees_what_was_published_before_it(client: Client, route: str) -> None:
    """HEAD, STAT and CUT behind a PUB in one write are answered after its commit."""
    publish = f"PUB {route} 2\nx\n".encode()
    client.send(publish + b"HEAD\nSTAT\nCUT\nHEAD\nCUT\n")
    number = sequence(client.reply())

    assert client.reply().startswith(f"OK seq={number:020d} ")
    assert json.loads(client.reply().removeprefix("OK "))["head"] == number
    assert client.reply() == f"OK cut {number + 1}"
    assert f"seq={number:020d} segment={number + 1:020d} " in client.reply()
    assert client.reply() == f"OK nothing-to-cut {number + 1}"


@pytest.mark.parametrize("size", [SPOOLED, REQUEST_MAX])
def test_large_payloads_are_taken_whole(shared: Daemon, client: Client, route: str, size: int) -> None:
    """Lines that do not fit into a connection's memory, up to the limit, each followed by another request."""
    payload = os.urandom(size - 1).replace(b"\n", b"\n\n")[: size - 1] + b"\n"
    client.publish(route, payload)
    client.send(f"PUB {route} 2\nx\n".encode())
    first, last = map(int, client.reply().split()[1:])

    assert last - first + 1 == payload.count(b"\n")
    assert client.reply() == f"OK {last + 1} {last + 1}"
    assert text(shared.root, route) == payload + b"x\n"


def test_columns_come_back_with_their_keys_and_times(shared: Daemon, client: Client, route: str) -> None:
    """Spooled; newlines in values are content."""
    count = 3000
    contents = [b"%d\n" % number * 50 for number in range(count)]
    keys = [None if number % 3 else b"key %d" % number for number in range(count)]
    payload = encode_columns(contents, keys=keys, times_ns=range(count))
    assert len(payload) > SPOOLED
    client.publish(route, payload, "enc=columns")

    first = sequence(client.reply())
    found = records(shared.root, route)
    assert [record.sequence for record in found] == list(range(first, first + count))
    assert [record.value for record in found] == contents
    assert [record.key for record in found] == keys
    assert [record.event_time_ns for record in found] == list(range(count))


def test_only_the_named_writers_may_write(
    start: Start, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel identifies the user; other routes stay open to all users, and root needs to be named too."""
    config, me = tmp_path / "wald.toml", os.geteuid()
    config.write_text(f"[routes.mine]\nwriters = [{me}]\n[routes.theirs]\nwriters = [{me + 1}]\n[routes.all]\n")
    daemon = start("--config", config, socket_mode="0666")
    requests = b"PUB mine 5\nmine\nPUB theirs 7\ntheirs\nPUB all 4\nall\n"
    with Client(daemon.socket_path) as client:
        assert client.ask(requests) == "OK 1 1"
        assert client.reply() == f"ERR denied user {me} may not write to route theirs"
        assert client.reply() == "OK 2 2"
    expected = [b"mine", b"all"]

    if me == 0:
        monkeypatch.chdir(root)  # the way to a test's directory is closed to others
        root.chmod(0o755)
        with acting_as(me + 1), Client(Path("wald.sock")) as client:
            assert client.ask(requests) == f"ERR denied user {me + 1} may not write to route mine"
            assert client.reply() == "OK 3 3"
            assert client.reply() == "OK 4 4"
        expected += [b"theirs", b"all"]

    assert values(root) == expected


def numbered(route: str, producer: int, number: int, payload: bytes = b"") -> bytes:
    payload = payload or b"%d\n" % number
    return b"PUB %b %d pid=%x pseq=%d\n%b" % (route.encode(), len(payload), producer, number, payload)


def test_batches_of_a_producer_are_stored_once_and_in_order(shared: Daemon, client: Client, route: str) -> None:
    # A number left out is a gap.
    assert client.ask(numbered(route, 0xA1, 5)).startswith("OK ")
    assert client.ask(numbered(route, 0xA1, 7)) == "ERR gap batch 7 of this producer arrived before batch 6"
    assert client.ask(numbered(route, 0xA1, 7, bytes(SPOOLED) + b"\n")).startswith("ERR gap ")
    assert client.ask(numbered(route, 0xA1, 6, b"no newline")).startswith("ERR bad-lines ")
    assert client.ask(numbered(route, 0xA1, 7)).startswith("ERR gap ")
    assert client.ask(numbered(route, 0xA1, 6)).startswith("OK ")
    assert client.ask(numbered(route, 0xA1, 7)).startswith("OK ")
    assert text(shared.root, route) == b"5\n6\n7\n"

    # A repetition in the same turn is acknowledged alike.
    one, two, four = (numbered(route, 0xA2, number) for number in (1, 2, 4))
    client.send(one + one + two + one + four + two)
    replies = [client.reply() for _ in range(6)]
    first = sequence(replies[0])
    assert [sequence(reply) for reply in replies if reply != replies[4]] == [first, first, first + 1, first, first + 1]
    assert replies[4].startswith("ERR gap ")
    assert text(shared.root, route) == b"5\n6\n7\n" + b"1\n2\n"

    # Two connections may share a producer.
    with Client(shared.socket_path) as other:
        first = sequence(client.ask(numbered(route, 0xA3, 1)))
        assert sequence(other.ask(numbered(route, 0xA3, 1))) == first
        assert sequence(other.ask(numbered(route, 0xA3, 2))) == first + 1
        assert client.ask(numbered(route, 0xA3, 4)).startswith("ERR gap ")
        assert sequence(client.ask(numbered(route, 0xA3, 3))) == first + 2
        client.send(numbered(route, 0xA3, 4))
        other.send(numbered(route, 0xA3, 4))
        assert client.reply() == other.reply() == f"OK {first + 3} {first + 3}"
    assert text(shared.root, route) == b"5\n6\n7\n" + b"1\n2\n" + b"1\n2\n3\n4\n"

    # Sixteen batches are remembered.
    first = sequence(client.ask(numbered(route, 0xA4, 1)))
    client.send(b"".join(numbered(route, 0xA4, number) for number in range(2, 19)))
    assert [sequence(client.reply()) for _ in range(17)] == list(range(first + 1, first + 18))
    assert sequence(client.ask(numbered(route, 0xA4, 3))) == first + 2
    assert (
        client.ask(numbered(route, 0xA4, 2)) == "ERR forgotten batch 2 of this producer is too old to be deduplicated"
    )
    assert client.ask(numbered(route, 0xA4, 1)).startswith("ERR forgotten ")


def test_a_forgotten_producer_that_has_not_seen_all_is_refused(start: Start, root: Path) -> None:
    """Even after a kill and a cut: any record up to the last batch of the next evicted producer may be its own."""

    def seeing(number: int, seen: int) -> bytes:
        return numbered("r", 7, number).replace(b"\n", b" seen=%d\n" % seen, 1)

    daemon = start(routes=["r"])
    with Client(daemon.socket_path) as client:
        assert client.ask(seeing(1, 0)) == "OK 1 1"
        client.send(b"".join(numbered("r", 1000 + number, 1) for number in range(PRODUCERS_MAX)))
        assert [client.reply() for _ in range(PRODUCERS_MAX)][-1] == "OK 1025 1025"
    for disturb in (lambda: None, daemon.kill, lambda: daemon.ask("CUT"), daemon.kill):
        disturb()
        if daemon.process.poll() is not None:
            daemon.start_again()
        with Client(daemon.socket_path) as client:
            for number in (1, 2):
                refusal = (
                    "ERR forgotten the daemon may have forgotten this producer; it may have records up to sequence 1"
                )
                assert client.ask(seeing(number, 0)) == refusal
    with Client(daemon.socket_path) as client:
        assert client.ask(seeing(2, 1)) == "OK 1026 1026"
        assert client.ask(seeing(2, 0)) == "OK 1026 1026"
        assert client.ask(numbered("r", 8, 5)) == "OK 1027 1027"
        assert client.ask(seeing(4, 1025)).startswith("ERR gap ")


def test_repetitions_and_conflicts_are_recognised_after_kills_and_cuts(start: Start, root: Path) -> None:
    """In batches that recovery scans and in the state that a cut passes on."""
    daemon = start(routes=["r"])
    large = b"l" * SPOOLED + b"\n"
    with Client(daemon.socket_path) as client:
        assert client.ask(numbered("r", 7, 1) + numbered("r", 7, 2)) == "OK 1 1"
        assert client.reply() == "OK 2 2"
        assert client.ask(numbered("r", 8, 1, large)) == "OK 3 3"
    for first, disturb in enumerate([daemon.kill, lambda: daemon.ask("CUT"), daemon.kill, daemon.stop], start=3):
        disturb()
        if daemon.process.poll() is not None:
            daemon.start_again()
        with Client(daemon.socket_path) as client:
            assert client.ask(numbered("r", 7, 1)) == "OK 1 1"
            assert client.ask(numbered("r", 8, 1, large)) == "OK 3 3"
            assert client.ask(numbered("r", 7, 1, b"eno\n")).startswith("ERR conflict ")
            assert client.ask(numbered("r", 8, 1, large[1:] + b"\n")).startswith("ERR conflict ")
            assert client.ask(numbered("r", 7, first + 1)).startswith("ERR gap ")
            assert client.ask(numbered("r", 7, first)) == f"OK {first + 1} {first + 1}"

    assert text(root, "r") == b"1\n2\n" + large + b"3\n4\n5\n6\n"


def test_other_content_under_a_number_that_is_taken_is_refused(shared: Daemon, client: Client, route: str) -> None:
    """Never acknowledged and dropped: in one write, in a later one, from another connection. The route is content."""
    other_route = route[:96] + ".two"
    assert shared.ask(f"ROUTE ADD {other_route}").startswith("OK ")
    first = sequence(client.ask(numbered(route, 0xC1, 1, b"one\n")))
    client.send(numbered(route, 0xC1, 2, b"two\n") + numbered(route, 0xC1, 2, b"tow\n") + b"PING\n")
    assert sequence(client.reply()) == first + 1
    assert client.reply().startswith("ERR conflict batch 2 was already sent")
    assert client.reply() == "OK pong"
    with Client(shared.socket_path) as other:
        for payload in (b"eno\n", b"o\ne\n", b"one\n\n", b"x" * SPOOLED + b"\n"):
            assert other.ask(numbered(route, 0xC1, 1, payload)).startswith("ERR conflict ")
        assert other.ask(numbered(other_route, 0xC1, 1, b"one\n")).startswith("ERR conflict ")
        assert sequence(other.ask(numbered(route, 0xC1, 1, b"one\n"))) == first

    assert text(shared.root, route) == b"one\ntwo\n"
    assert text(shared.root, other_route) == b""
    # A batch's body is the route and then the payload: the same bytes, parted elsewhere, are other content.
    end, rest = b"payload1", b"text\n" + b"x" * 10 + b"\n"
    assert shared.ask(f"ROUTE ADD {route[:96]}{end.decode()}").startswith("OK ")
    assert shared.ask(f"ROUTE ADD {route[:96]}").startswith("OK ")
    assert client.ask(numbered(route[:96], 0xC2, 1, end + rest)).startswith("OK ")
    assert client.ask(numbered(route[:96] + end.decode(), 0xC2, 1, rest)).startswith("ERR conflict ")


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_a_producer_id_is_its_users_own(start: Start, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has read it elsewhere, in a segment or over a shoulder, can neither be taken for it nor be in its way."""
    daemon = start(socket_mode="0666", routes=["r"])
    monkeypatch.chdir(root)  # the way to a test's directory is closed to others
    root.chmod(0o755)
    with Client(daemon.socket_path) as mine:
        assert mine.ask(numbered("r", 7, 1, b"mine\n")) == "OK 1 1"
        with acting_as(os.geteuid() + 1), Client(Path("wald.sock")) as theirs:
            for number in (1, 2):
                assert theirs.ask(numbered("r", 7, number, b"theirs\n")) == f"OK {1 + number} {1 + number}"
        assert mine.ask(numbered("r", 7, 2, b"mine\n")) == "OK 4 4"
        assert mine.ask(numbered("r", 7, 1, b"mine\n")) == "OK 1 1"

    assert values(root) == [b"mine", b"theirs", b"theirs", b"mine"]


PUBLISH = """
import socket, sys
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[1])
sys.stdin.readline()
connection.sendall(b"PUB a 2\\nx\\n")
print("sent", flush=True)
print(connection.recv(100).decode(), end="", flush=True)
"""


def fileno(pipe: IO[bytes] | None) -> int:
    """The descriptor of a pipe to a program."""
    assert pipe is not None
    return pipe.fileno()


def line_of(program: subprocess.Popen[bytes]) -> bytes:
    """The next line that a program prints."""
    line = b""
    while not line.endswith(b"\n"):
        read = os.read(fileno(program.stdout), 1)
        assert read, line
        line += read
    return line


def senders(root: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the sender of each record by route, from ``wald read --format json``. ``Any``: JSON."""
    line = command("read", "--root", root, "--format", "json")
    done = subprocess.run(line, capture_output=True, check=True, text=True)
    found: dict[str, list[dict[str, Any]]] = {}
    for record in map(json.loads, done.stdout.splitlines()):
        found.setdefault(record["route"], []).append(record["sender"])
    return found


def test_each_way_in_says_who_it_was(start: Start, root: Path) -> None:
    """In the active segment, and in a sealed one; also after a kill."""
    reading, writing = os.pipe()
    daemon = start("--stdin", "typed", stdin=reading)
    os.close(reading)
    daemon.ask("ROUTE ADD a")
    daemon.ask("ROUTE ADD piped fifo")
    os.write(writing, b"typed\n")
    assert daemon.ask("PUB a 2\nx").startswith("OK")
    assert daemon.ask("PUB a 2 pid=7 pseq=1\ny").startswith("OK")
    (root / "routes" / "piped" / "in").write_bytes(b"piped\n")
    eventually(lambda: wald.open(root).where(4).durable)
    me = {"via": "socket", "user": os.getuid(), "pid": os.getpid(), "process": Path("/proc/self/comm").read_text()[:-1]}

    def told() -> None:
        found = senders(root)
        first, second = found.pop("a")
        assert found == {"typed": [{"via": "stdin"}], "piped": [{"via": "fifo"}]}
        assert first == me
        assert second == me | {"producer_id": second["producer_id"]}

    told()
    daemon.kill()
    os.close(writing)
    told()
    with start():
        eventually((root / "segments" / f"{1:020}.wal.zst").exists)
        told()


def test_records_of_two_processes_in_one_turn_stay_apart(start: Start, root: Path) -> None:
    """On one route and without producer ids, where those of one process become one batch."""
    daemon = start(routes=["a"])
    line = [sys.executable, "-c", PUBLISH, str(daemon.socket_path)]
    with ExitStack() as running:
        processes = [
            running.enter_context(subprocess.Popen(line, stdin=subprocess.PIPE, stdout=subprocess.PIPE))
            for _ in range(2)
        ]
        eventually(lambda: stat(daemon)["connections"] == 3)
        running.callback(daemon.process.send_signal, signal.SIGCONT)
        daemon.process.send_signal(signal.SIGSTOP)  # both requests have arrived when it continues
        for each in processes:
            os.write(fileno(each.stdin), b"\n")
            assert line_of(each) == b"sent\n"
        daemon.process.send_signal(signal.SIGCONT)
        numbers = {int(line_of(each).split()[1]): each.pid for each in processes}
    assert numbers == dict(enumerate((sender["pid"] for sender in senders(root)["a"]), start=1))
