"""Senders of batches, which every form of a segment identifies, even damaged."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from contents import assert_sound, errors
from logs import Built, commit, draft

import wald
from wald.checking.dump import dump
from wald.format.batch import Flag
from wald.format.log_state import FIFO_PEER, STDIN_PEER, BadControl, Peer, decode_peer, encode_peer
from wald.format.names import Kind
from wald.format.segment import pack_version, version_text
from wald.segments.sealed_file import SealedFile
from wald.writing import writer as writing
from wald.writing.writer import Draft, Sender

CURL, BASH = Peer(1000, 4711, "curl"), Peer(0, 1, 'ba"sh\n\x00ü')


def sent(*peers: Sender, payload: bytes = b"x\n") -> list[Draft]:
    """A draft of each of ``peers``."""
    return [replace(draft(payload), peer=peer) for peer in peers]


def senders(built: Built) -> list[str]:
    """Return the sender of each batch."""
    return [str(built.log.sender(batch)) for batch in built.log.batches()]


def introduced(built: Built, base: int) -> list[int]:
    """The numbers of the peers that a raw segment introduces."""
    return [item["peer"] for item in dump(built.path(base, Kind.RAW)) if item["kind"] == "peer"]


IN_WORDS = ["socket, user 1000, process 4711 (curl)", "fifo", "stdin", "unknown"]


def test_a_peer_and_a_version_come_back_and_nothing_else_is_a_peer() -> None:
    for peer in (CURL, BASH, Peer((1 << 32) - 1, 1 << 22, "")):
        assert decode_peer(encode_peer(peer)) == peer
    for payload in (b"", b"[]", b"{}", b'{"user":1}', b'{"user":"a","pid":1,"process":""}', b"\xff"):
        with pytest.raises(BadControl):
            decode_peer(payload)
    for text in ("0.1.0", "1.2.3", "255.255.65535"):
        assert version_text(pack_version(text)) == text


def test_each_form_of_a_segment_says_who_sent_its_batches(tmp_path: Path) -> None:
    """And one whose index is lost: its frames are walked."""
    built = Built(tmp_path / "log")
    commit(built, sent(CURL, FIFO_PEER, STDIN_PEER, 0, CURL))
    expected = [*IN_WORDS, IN_WORDS[0]]
    assert senders(built) == expected
    built.cut()
    built.seal()
    assert senders(built) == expected
    assert_sound(built.root.path)
    sealed = built.path(1, Kind.SEALED)
    os.truncate(sealed, sealed.stat().st_size - 1)
    assert senders(built) == expected


def test_a_peer_is_introduced_once_in_each_segment(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    for _ in range(3):
        commit(built, sent(CURL, BASH, CURL))
    built.cut()
    commit(built, sent(BASH))
    assert len(introduced(built, 1)) == 2
    # Recovery treats batches after a hole in a commit round as unfinished unless a barrier follows the hole.
    items = [item for item in dump(built.path(1, Kind.RAW)) if item["kind"] in ("peer", "batch")]
    assert [Flag.BARRIER.name in item["flags"] for item in items[:3]] == [True, False, False]
    assert len(introduced(built, 10)) == 1
    assert senders(built)[-1] == f"socket, user 0, process 1 ({BASH.process})"
    assert_sound(built.root.path)


def test_more_peers_than_are_remembered_are_introduced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_PEERS_MAX", 10)
    built = Built(tmp_path / "log")
    peers = [Peer(1000, pid, "") for pid in range(1, 31)]
    for peer in peers + peers:
        commit(built, sent(peer))
    assert len(introduced(built, 1)) > len(peers)
    assert senders(built) == [f"socket, user 1000, process {peer.pid}" for peer in peers + peers]
    assert len(built.writer._peers) < 20
    assert_sound(built.root.path)


def test_a_record_in_pieces_is_from_who_began_it(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    commit(built, [replace(draft(b"begun"), count=1, flags=Flag.CONTINUED, peer=CURL)])
    ending = replace(draft(b" ended\n"), count=0, flags=Flag.CONTINUES, continues=1)
    commit(built, [replace(ending, peer=BASH)])
    assert senders(built) == [IN_WORDS[0]]


def test_what_introduced_a_peer_can_be_lost_and_its_records_are_not(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    commit(built, sent(CURL))
    (number,) = introduced(built, 1)
    raw = built.path(1, Kind.RAW)
    with raw.open("r+b") as file:
        file.seek(8 * number + 70)
        file.write(b"?")
    assert senders(built) == ["socket"]
    assert errors(built.root.path) != []
    built.cut()
    built.seal()
    assert senders(built) == ["socket"]


def test_verify_finds_an_index_that_names_another_peer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = Built(tmp_path / "log")
    commit(built, sent(CURL))
    built.cut()
    with monkeypatch.context() as patched:
        patched.setattr("wald.segments.index_builder.decode_peer", lambda _: BASH)
        built.seal()
    assert any("the peers in the index do not match the frames" in error for error in errors(built.root.path))


def test_a_segment_says_which_version_wrote_it(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("web", [b"x"])
    built.cut()
    version = wald.__version__
    assert next(iter(dump(built.path(1, Kind.RAW))))["writer"] == version
    built.seal()
    with SealedFile(built.path(1, Kind.SEALED)) as sealed:
        assert version_text(sealed.index.writer) == version


def test_as_many_drafts_are_placed_as_fit_a_segment_with_the_introductions_of_their_peers(tmp_path: Path) -> None:
    built = Built(tmp_path / "log", segment_max_bytes=4096)
    drafts = sent(CURL, BASH, CURL, payload=b"x" * 1500 + b"\n")
    placed = built.writer.place(drafts, limited=True)
    assert [(each.introduces, each.peer) for each in placed] == [
        (True, CURL),
        (False, CURL),
        (True, BASH),
        (False, BASH),
    ]
    assert placed[-1].position + placed[-1].total_bytes <= 4096 < placed[-1].position + 2 * placed[-1].total_bytes
    assert len(built.writer.place(drafts)) == 5
    huge = sent(BASH, CURL, payload=b"x" * 9000 + b"\n")
    assert [each.peer for each in built.writer.place(huge, limited=True)] == [BASH, BASH]
