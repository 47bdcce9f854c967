"""Producers that send again: a batch is in the log once, and other content under its number is refused."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from asking import SPOOLED, sequence
from contents import assert_sound, text, values
from running import Client, Daemon
from users import acting_as

from wald.format.log_state import PRODUCERS_MAX

Start = Callable[..., Daemon]


def numbered(route: str, producer: int, number: int, payload: bytes = b"") -> bytes:
    payload = payload or b"%d\n" % number
    return b"PUB %b %d pid=%x pseq=%d\n%b" % (route.encode(), len(payload), producer, number, payload)


def test_a_number_left_out_is_a_gap(shared: Daemon, client: Client, route: str) -> None:
    """A producer may start at any number; a refused batch can be sent again once the gap is filled."""
    assert client.ask(numbered(route, 0xA1, 5)).startswith("OK ")
    assert client.ask(numbered(route, 0xA1, 7)) == "ERR gap batch 7 of this producer arrived before batch 6"
    assert client.ask(numbered(route, 0xA1, 7, bytes(SPOOLED) + b"\n")).startswith("ERR gap ")
    assert client.ask(numbered(route, 0xA1, 6, b"no newline")).startswith("ERR bad-lines ")
    assert client.ask(numbered(route, 0xA1, 7)).startswith("ERR gap ")
    assert client.ask(numbered(route, 0xA1, 6)).startswith("OK ")
    assert client.ask(numbered(route, 0xA1, 7)).startswith("OK ")

    assert text(shared.root, route) == b"5\n6\n7\n"


def test_a_repetition_in_the_same_turn_is_acknowledged_alike(shared: Daemon, client: Client, route: str) -> None:
    """In one write, twice each; and a gap is one however it is sent."""
    one, two, four = (numbered(route, 0xA2, number) for number in (1, 2, 4))
    client.send(one + one + two + one + four + two)
    replies = [client.reply() for _ in range(6)]

    first = sequence(replies[0])
    assert [sequence(reply) for reply in replies if reply != replies[4]] == [first, first, first + 1, first, first + 1]
    assert replies[4].startswith("ERR gap ")
    assert text(shared.root, route) == b"1\n2\n"


def test_two_connections_may_share_a_producer(shared: Daemon, client: Client, route: str) -> None:
    """After a reconnect, the old connection may still exist: order and deduplication cover both."""
    with Client(shared.socket_path) as other:
        first = sequence(client.ask(numbered(route, 0xA3, 1)))
        assert sequence(other.ask(numbered(route, 0xA3, 1))) == first
        assert sequence(other.ask(numbered(route, 0xA3, 2))) == first + 1
        assert client.ask(numbered(route, 0xA3, 4)).startswith("ERR gap ")
        assert sequence(client.ask(numbered(route, 0xA3, 3))) == first + 2
        client.send(numbered(route, 0xA3, 4))
        other.send(numbered(route, 0xA3, 4))
        assert client.reply() == other.reply() == f"OK {first + 3} {first + 3}"

    assert text(shared.root, route) == b"1\n2\n3\n4\n"


def test_sixteen_batches_are_remembered(client: Client, route: str) -> None:
    """An older one cannot be distinguished from a repetition or from something new."""
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

    daemon = start()
    daemon.ask("ROUTE ADD r")
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


def test_repetitions_are_recognised_after_kills_and_cuts(start: Start, root: Path) -> None:
    """The daemon finds them in the active segment and in the state that a cut passes on."""
    daemon = start()
    daemon.ask("ROUTE ADD r")
    with Client(daemon.socket_path) as client:
        assert client.ask(numbered("r", 7, 1) + numbered("r", 7, 2)) == "OK 1 1"
        assert client.reply() == "OK 2 2"
    for first, disturb in enumerate([daemon.kill, lambda: daemon.ask("CUT"), daemon.kill, daemon.stop], start=2):
        disturb()
        if daemon.process.poll() is not None:
            daemon.start_again()
        with Client(daemon.socket_path) as client:
            assert client.ask(numbered("r", 7, 1)) == "OK 1 1"
            assert client.ask(numbered("r", 7, first)) == f"OK {first} {first}"
            assert client.ask(numbered("r", 7, first + 2)).startswith("ERR gap ")
            assert client.ask(numbered("r", 7, first + 1)) == f"OK {first + 1} {first + 1}"

    assert text(root, "r") == b"1\n2\n3\n4\n5\n6\n"
    assert_sound(root)


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


def test_the_end_of_a_route_and_the_beginning_of_a_payload_are_distinguished(shared: Daemon, client: Client) -> None:
    """A batch's body is the route and then the payload: the same bytes, parted elsewhere, are other content."""
    for name in ("ROUTE ADD shifted1", "ROUTE ADD shifted1payload1"):
        assert shared.ask(name).startswith("OK ")
    assert client.ask(numbered("shifted1", 0xC2, 1, b"payload1text\n" + b"x" * 10 + b"\n")).startswith("OK ")

    assert client.ask(numbered("shifted1payload1", 0xC2, 1, b"text\n" + b"x" * 10 + b"\n")).startswith("ERR conflict ")


def test_a_conflict_is_seen_after_kills_and_cuts(start: Start, root: Path) -> None:
    """The daemon finds it in batches that recovery scans and in the state that a cut passes on."""
    daemon = start()
    daemon.ask("ROUTE ADD r")
    large = b"l" * SPOOLED + b"\n"
    with Client(daemon.socket_path) as client:
        assert client.ask(numbered("r", 7, 1, b"one\n") + numbered("r", 7, 2, large)) == "OK 1 1"
        assert client.reply() == "OK 2 2"
    for disturb in (daemon.kill, lambda: daemon.ask("CUT"), daemon.kill):
        disturb()
        if daemon.process.poll() is not None:
            daemon.start_again()
        with Client(daemon.socket_path) as client:
            assert client.ask(numbered("r", 7, 1, b"eno\n")).startswith("ERR conflict ")
            assert client.ask(numbered("r", 7, 2, large[1:] + b"\n")).startswith("ERR conflict ")
            assert client.ask(numbered("r", 7, 1, b"one\n")) == "OK 1 1"
            assert client.ask(numbered("r", 7, 2, large)) == "OK 2 2"

    assert text(root, "r") == b"one\n" + large


@pytest.mark.skipif(os.geteuid() != 0, reason="takes another user's place")
def test_a_producer_id_is_its_users_own(start: Start, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever has read it elsewhere, in a segment or over a shoulder, can neither be taken for it nor be in its way."""
    daemon = start(socket_mode="0666")
    daemon.ask("ROUTE ADD r")
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
