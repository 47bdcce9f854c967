"""A daemon that accepts published records, and peers with scripted answers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from peer import Answer, Answering, Peer
from running import Daemon, output_of


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    with Daemon(tmp_path / "log") as running:
        output_of("route", "add", "a", "--root", running.root)
        yield running


@pytest.fixture
def answering(tmp_path: Path) -> Iterator[Answering]:
    """Start a peer whose answer to the n-th request is scripted; return the path of its socket."""
    peers: list[Peer] = []

    def make(answer: Answer) -> Path:
        path = tmp_path / "peer.sock"
        peers.append(Peer(path, answer))
        return path

    yield make
    for peer in peers:
        peer.close()
