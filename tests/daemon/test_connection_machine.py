"""The state machine of a connection: however a stream is cut into reads, its records and replies are the same."""

import os
from collections.abc import Iterable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from wald.daemon.backpressure import COMMAND, NEXT_ROUND, OVERDUE, Backpressure, Reason, Wait
from wald.daemon.commands import Routes
from wald.daemon.committer import Arena, CommitRound, Ticket
from wald.daemon.connection import Connection, UnfinishedRequests
from wald.daemon.connections import close_files, write_part
from wald.files.disk import Disk
from wald.files.identity import create_root
from wald.files.layout import Root
from wald.files.routes import add_route
from wald.format.log_state import Peer as Sender
from wald.format.log_state import Producers
from wald.format.protocol import LINE_MAX_BYTES, Command, Publish, encode_publish

MEMORY_MAX_BYTES = 40  # of unfinished requests; larger payloads are spooled
REQUEST_MAX_BYTES = 5000
OPEN = Backpressure(False, False, frozenset(), float("inf"), {})

Outcome = tuple[str, object]
"""A record that was accepted, a reply, or a command, as a test compares it."""


class Peer:
    """One connection, fed as the daemon does: each read is a commit round that is answered before the next one."""

    def __init__(self, root: Root) -> None:
        self.unfinished = UnfinishedRequests(REQUEST_MAX_BYTES, memory_max_bytes=MEMORY_MAX_BYTES)
        self.directory = root.segments
        user_id = os.getuid()
        self.connection = Connection(
            user_id, lambda: Sender(user_id, os.getpid(), "test"), Routes(root, {}), self.unfinished
        )
        self.arena = Arena(1 << 16)
        self.outcomes: list[Outcome] = []

    def read(self, data: bytes, backpressure: Backpressure = OPEN) -> None:
        """Receive ``data``, and run commands until the connection waits for more."""
        self.receive(data, backpressure)
        while self.connection.wait is NEXT_ROUND or self.connection.wait is COMMAND:
            if self.connection.command is not None:
                self.outcomes.append(("command", self.connection.command))
                self.connection.end_command()
            else:
                self.receive(b"", backpressure)

    def receive(self, data: bytes, backpressure: Backpressure) -> None:
        connection, arena = self.connection, self.arena
        received = connection.unread + data
        arena.view[: len(received) + 5] = received + b"PING\n"  # of another connection, in an earlier round
        arena.used, arena.filled = 0, len(received)
        commit_round = CommitRound(Producers(), arena)
        connection.receive(commit_round, backpressure)
        while connection.spooling is not None and connection.spooling.unwritten is not None:
            write_part(connection.spooling, self.directory, lambda descriptor: descriptor > 0)
            connection.receive(commit_round, backpressure)
        assert connection.unread == received[arena.used :]
        self.outcomes += self.answers()
        connection.reply(lambda command, _: b"OK\n")
        close_files(self.unfinished.complete)
        close_files(self.unfinished.discarded)

    def answers(self) -> Iterator[Outcome]:
        payloads: dict[int, int] = {}
        for answer in self.connection.answers:
            if isinstance(answer, Ticket):
                draft = answer.draft
                if draft.spool is not None:
                    yield "record", (draft.route.name, os.pread(draft.spool, draft.payload_bytes, 0))
                else:
                    number = payloads[id(draft)] = payloads.get(id(draft), -1) + 1
                    yield "record", (draft.route.name, bytes(draft.payload[number]))
            else:
                yield "command" if isinstance(answer, Command) else "reply", answer

    def state(self) -> tuple[object, ...]:
        connection = self.connection
        return (
            connection.unread,
            connection.wait,
            connection.is_closing,
            connection.is_inside_request,
            connection.payload_missing,
            self.unfinished.memory_bytes,
        )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Root:
    path: Path = tmp_path_factory.mktemp("machine") / "root"
    create_root(path, Disk(), now="2026-11-29T00:00:00.000Z")
    for route in ("web", "b"):
        add_route(Root(path), Disk(), route)
    return Root(path)


def read_all(root: Root, chunks: Iterable[bytes]) -> Peer:
    peer = Peer(root)
    for chunk in chunks:
        peer.read(chunk)
        assert len(peer.connection.unread) <= LINE_MAX_BYTES + MEMORY_MAX_BYTES
        assert peer.unfinished.memory_bytes == len(peer.connection.unread)
    return peer


def cut(stream: bytes, places: Iterable[int]) -> list[bytes]:
    ends = sorted({min(place, len(stream)) for place in places} | {0, len(stream)})
    return [stream[start:end] for start, end in pairwise(ends)]


def publish(route: bytes, payload: bytes) -> bytes:
    return encode_publish(Publish(route, len(payload))) + payload


LINES = st.binary(max_size=3 * MEMORY_MAX_BYTES).map(lambda payload: payload + b"\n")
REQUESTS = st.one_of(
    st.builds(publish, st.sampled_from([b"web", b"b", b"absent"]), LINES),
    st.builds(publish, st.just(b"web"), st.binary(max_size=3 * MEMORY_MAX_BYTES)),
    st.sampled_from(
        [b"PING\n", b"HEAD\r\n", b"ROUTE ADD x\n", b"\n", b"GET /\n", b"PUB web 0\n", b"PUB web 5 x=y\n12345"]
    ),
    st.just(b"PUB web 6000\n" + b"p" * 6000),
)
STREAMS = st.lists(REQUESTS, max_size=8).map(b"".join) | st.binary(max_size=200)
PLACES = st.lists(st.integers(0, 7000), max_size=20)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=STREAMS | st.tuples(STREAMS, st.binary(max_size=300)).map(b"".join), places=PLACES)
def test_any_cut_gives_the_same_outcomes(root: Root, stream: bytes, places: list[int]) -> None:
    """The outcome does not depend on how a stream is split."""
    at_once = read_all(root, [stream])
    in_pieces = read_all(root, cut(stream, places))
    by_bytes = read_all(root, (stream[at : at + 1] for at in range(len(stream))))

    assert at_once.outcomes == in_pieces.outcomes == by_bytes.outcomes
    assert at_once.state() == in_pieces.state() == by_bytes.state()
    for peer in (at_once, in_pieces, by_bytes):
        peer.connection.close()
        assert (peer.unfinished.memory_bytes, peer.unfinished.promised_to_others(1 << 30)) == (0, 0)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    chunks=st.lists(
        st.binary(max_size=300) | st.sampled_from([b"PUB ", b"web ", b"9\n", b"\n", b"x" * 600]), max_size=30
    )
)
def test_after_a_request_without_a_known_end_nothing_is_processed(root: Root, chunks: list[bytes]) -> None:
    """No bytes raise an error, and a closing connection keeps and answers nothing more."""
    peer = Peer(root)
    for chunk in chunks:
        was_closing, before = peer.connection.is_closing, len(peer.outcomes)
        peer.read(chunk)
        assert not was_closing or len(peer.outcomes) == before
        assert not (peer.connection.is_closing and peer.connection.unread)
    peer.connection.close()


def test_requests_of_one_read_are_processed_refused_or_kept_waiting_one_by_one(root: Root) -> None:
    # Many requests of one read: they are processed in order, without a copy of their payloads.
    peer = Peer(root)
    stream = b"PUB web 2\nx\nPING\nPUB b 3\nyz\n"
    peer.arena.view[: len(stream)] = stream
    peer.arena.filled = len(stream)
    commit_round = CommitRound(Producers(), peer.arena)
    peer.connection.receive(commit_round, OPEN)
    assert list(peer.answers()) == [
        ("record", ("web", b"x\n")),
        ("command", Command("PING")),
        ("record", ("b", b"yz\n")),
    ]
    payloads = [payload for draft in commit_round.drafts for payload in draft.payload]
    assert all(memoryview(payload).obj is peer.arena.buffer for payload in payloads)
    assert not peer.connection.is_inside_request

    # A request is refused before its payload arrives.
    for line in (b"PUB absent 4000\n", b"PUB web 6000\n", b"PUB web 6 what=ever\n"):
        payload = b"p" * int(line.split()[2])
        peer = Peer(root)
        peer.read(line + payload[:3])
        assert [kind for kind, _ in peer.outcomes] == ["reply"]
        peer.read(payload[3:] + b"PING\n")
        assert peer.outcomes[1:] == [("command", Command("PING"))]
        assert not peer.connection.is_inside_request

    # A request for a busy route waits and is refused after a timeout.
    peer = Peer(root)
    busy = Backpressure(False, False, frozenset({"web"}), float("inf"), {})
    peer.read(b"PUB web 2\nx\nPUB b 2\ny\n", busy)
    assert (peer.connection.wait, peer.outcomes) == (Wait(Reason.BUSY, "web"), [])
    assert busy.must_keep_waiting(Wait(Reason.BUSY, "web"), peer.unfinished.promised_to_others)
    assert peer.connection.time_out()
    assert peer.connection.wait is OVERDUE
    peer.read(b"", busy)
    assert peer.outcomes == [
        ("reply", b"ERR busy a pipe is in the middle of a long line for route web\n"),
        ("record", ("b", b"y\n")),
    ]
    assert not peer.connection.time_out()
