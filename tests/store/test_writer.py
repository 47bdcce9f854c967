"""The active segment: where batches go, what bytes they become, when they are synced, and who sent them."""

import os
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from contents import assert_sound, errors, records, values
from faults import FailingDisk, TracingDisk
from hypothesis import given, settings
from hypothesis import strategies as st
from logs import Built, commit, draft
from writing import NEVER, assert_whole, batches, commit_more, with_some_records

import wald
from wald.checking.dump import dump
from wald.format.batch import TRAILER, Flag, checksum_body
from wald.format.log_state import FIFO_PEER, STDIN_PEER, BadControl, DedupEntry, Peer, decode_peer, encode_peer
from wald.format.names import Kind
from wald.format.segment import SEGMENT_HEADER, pack_version, version_text
from wald.segments.sealed_file import SealedFile
from wald.writing import writer as writing
from wald.writing.writer import Draft, Route, Sender


def raw(built: Built) -> bytes:
    """The active segment up to its durable end."""
    return active(built).read_bytes()[: built.writer.position]


def active(built: Built) -> Path:
    return built.path(built.writer.base_sequence, Kind.RAW)


class TestPlaces:
    """Positions of batches."""

    def test_the_next_batch_overshoots_only_a_segment_that_has_a_sequence(self, tmp_path: Path) -> None:
        """A record larger than a segment makes its segment grow."""
        built = Built(tmp_path / "log", segment_max_bytes=4096)
        writer = built.writer
        assert not writer.overshoots(1 << 30)
        large = bytes(range(1, 10)) * 10_000
        built.lines("web", [large])
        assert writer.base_sequence == 1
        assert built.path(1, Kind.RAW).stat().st_size == writer.position > 90_000
        assert writer.overshoots(8)
        built.cut()
        built.lines("web", [b"small"])
        room = 4096 - writer.position
        assert (writer.overshoots(room), writer.overshoots(room + 1)) == (False, True)
        assert values(built.root.path) == [large, b"small"]
        assert_sound(built.root.path)

    def test_a_control_batch_larger_than_a_segment_does_not_make_every_commit_a_cut(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log", segment_max_bytes=4096)
        for producer in range(1, 200):
            built.writer.state.producers.add(producer, DedupEntry(1, 1, 1, 1))
        built.lines("web", [b"1"], cut=True)
        assert built.writer.position > 4096
        built.lines("web", [b"2"])
        assert not built.writer.overshoots(1024)
        assert built.writer.overshoots(built.writer.position)

    def test_a_cut_segment_ends_with_its_last_batch_and_the_active_one_is_allocated(self, tmp_path: Path) -> None:
        built = Built(tmp_path / "log", segment_max_bytes=1 << 16)
        built.lines("web", [b"1"])
        end = built.writer.position
        built.cut()
        assert built.path(1, Kind.RAW).stat().st_size == end
        assert built.path(2, Kind.RAW).stat().st_size == 1 << 16
        built.writer.close()
        assert built.path(2, Kind.RAW).stat().st_size == built.writer.position


def spool(made: Draft, directory: str, payload: bytes) -> int:
    """Put ``payload`` in a file, as the daemon does with a large one; returns the descriptor."""
    descriptor = os.open(directory, os.O_TMPFILE | os.O_RDWR)
    os.write(descriptor, payload)
    made.spool, made.payload = descriptor, []
    made.body_checksum = checksum_body(made.route.prefix, [payload], made.payload_bytes)
    return descriptor


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=40), st.booleans()), min_size=1, max_size=6))
def test_a_spooled_draft_becomes_the_same_bytes_as_one_in_memory(lines: list[tuple[bytes, bool]]) -> None:
    """Alone and among others, of every length modulo the alignment."""
    with tempfile.TemporaryDirectory() as directory:
        written = []
        for through_files in (False, True):
            built = Built(Path(directory) / str(through_files))
            drafts = [draft(line.replace(b"\n", b"") + b"\n") for line, _ in lines]
            for made, (_, through_a_file) in zip(drafts, lines, strict=True):
                if through_files and through_a_file:
                    spool(made, directory, bytes(made.payload[0]))
            commit(built, drafts)
            for made in drafts:
                if made.spool is not None:
                    os.close(made.spool)
            data = raw(built)
            salted = [(each.offset + 4, each.offset + 8) for each in batches(active(built))]
            salted += [(each.end - TRAILER.size, each.end) for each in batches(active(built))]
            for start, end in salted:  # the checksums, which each segment has its own of
                data = data[:start] + bytes(end - start) + data[end:]
            written.append(data[SEGMENT_HEADER.size :])
            assert values(built.root.path) == [line.replace(b"\n", b"") for line, _ in lines]
            built.writer.close()
        assert written[0] == written[1]


def test_a_spool_that_became_shorter_fails_the_commit(tmp_path: Path) -> None:
    built = with_some_records(tmp_path / "log", TracingDisk())
    made = draft(b"5" * 100 + b"\n")
    descriptor = spool(made, str(tmp_path), b"5" * 50)
    with pytest.raises(OSError, match="shrank"):
        commit(built, [made])
    assert built.writer.failed
    built.writer.replace(now_ns=built.now_ns)
    commit_more(built)
    assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7"]
    assert_whole(built)
    os.close(descriptor)


ACTIONS = st.lists(
    st.one_of(
        st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 3)), min_size=1, max_size=4),
        st.sampled_from(["cut", "fail", "seal", "restart", "crash"]),
    ),
    max_size=25,
)


@settings(max_examples=30, deadline=None)
@given(ACTIONS, st.randoms(use_true_random=False))
def test_sequences_have_no_gap_whatever_happens_between_commits(
    actions: list[str | list[tuple[str, int]]], chance: random.Random
) -> None:
    """Compared with a list, read back through :func:`wald.open`."""
    with tempfile.TemporaryDirectory() as directory:
        path, model = Path(directory) / "log", list[tuple[int, str, bytes]]()
        built = Built(path, segment_max_bytes=4096)
        for action in actions:
            built.now_ns += chance.randrange(-5, 10) * 1_000_000_000
            if action == "cut":
                if built.writer.has_advanced:
                    built.cut()
            elif action == "seal":
                built.seal()
            elif action == "fail":
                built.writer.failed = True
                built.writer.replace(now_ns=built.now_ns)
                built.publish()
            elif action in ("restart", "crash"):
                if action == "restart":
                    built.writer.close()
                else:
                    built.crash()
                epoch = built.writer.epoch + 1
                built = Built(path, segment_max_bytes=4096, epoch=epoch, now_ns=built.now_ns)
                assert built.report.errors == []
            elif isinstance(action, list):
                drafts = []
                for route, count in action:
                    lines = [b"%d" % chance.randrange(1000) for _ in range(count)]
                    drafts.append(draft(b"".join(line + b"\n" for line in lines), route=Route.named(route)))
                    model += [(len(model) + number, route, line) for number, line in enumerate(lines, start=1)]
                if built.writer.overshoots(sum(made.total_bytes for made in drafts)):
                    built.cut()
                commit(built, drafts)
            assert built.last == len(model)
        found = records(path)
        assert [(record.sequence, record.route, record.value) for record in found] == model
        times = [record.append_time_ns for record in found]
        assert times == sorted(times)
        built.writer.close()


class TestUnsyncedCommits:
    """``sync = "interval"`` and ``"never"``."""

    @pytest.fixture
    def disk(self) -> TracingDisk:
        return TracingDisk()

    @pytest.fixture
    def built(self, tmp_path: Path, disk: TracingDisk) -> Built:
        built = Built(tmp_path / "log", disk=disk, sync_commits=False)
        built.lines("web", [b"1"])
        disk.steps.clear()
        return built

    def test_a_commit_does_not_sync_and_a_sync_makes_up_for_it(self, built: Built, disk: TracingDisk) -> None:
        commit(built, [draft(b"2\n")])
        assert [name for name, _ in disk.steps] == ["write"]
        assert built.writer.unsynced
        built.writer.sync()
        assert [name for name, _ in disk.steps] == ["write", "sync"]
        assert not built.writer.unsynced

    def test_a_sync_that_fails_finishes_the_descriptor(self, built: Built) -> None:
        built.writer._disk = FailingDisk(0)
        with pytest.raises(OSError, match="No space"):
            built.writer.sync()
        assert built.writer.failed
        assert not built.writer.unsynced
        built.writer.replace(now_ns=built.now_ns)
        commit(built, [draft(b"2\n")])
        assert values(built.root.path) == [b"1", b"2"]


class TestSpare:
    """The file for the next cut, made beforehand."""

    def test_a_cut_takes_it_and_allocates_nothing(self, tmp_path: Path) -> None:
        disk = TracingDisk()
        built = with_some_records(tmp_path / "log", disk)
        built.writer.prepare_spare()
        built.writer.prepare_spare()
        assert disk.steps.count(("allocate", "spare-1.tmp")) == 1
        (spare,) = built.root.segments.glob("spare-*.tmp")
        number = spare.stat().st_ino
        disk.steps.clear()
        built.cut()
        assert "allocate" not in [name for name, _ in disk.steps]
        assert built.path(5, Kind.RAW).stat().st_ino == number
        assert not spare.exists()

    def test_one_that_cannot_be_used_is_given_up(self, tmp_path: Path) -> None:
        """And the next attempt makes another."""
        disk = FailingDisk(NEVER)
        built = with_some_records(tmp_path / "log", disk)
        descriptors = set(disk.descriptors)
        built.writer.prepare_spare()
        disk.left = 0
        with pytest.raises(OSError, match="No space"):
            built.cut()
        assert disk.descriptors == descriptors
        built.writer.prepare_spare()
        built.cut()
        commit_more(built)
        assert_whole(built)

    @pytest.mark.parametrize("harm", ["removed", "replaced"])
    def test_one_that_lost_its_name_never_becomes_a_segment(self, tmp_path: Path, harm: str) -> None:
        """The cut makes another, and leaves nothing of it open."""
        disk = TracingDisk()
        built = with_some_records(tmp_path / "log", disk)
        descriptors = set(disk.descriptors)
        built.writer.prepare_spare()
        (spare,) = built.root.segments.glob("spare-*.tmp")
        spare.unlink()
        if harm == "replaced":
            spare.touch()
        built.cut()
        assert (len(disk.descriptors), built.writer.base_sequence) == (len(descriptors), 5)
        assert built.writer.is_named()
        commit_more(built)
        assert values(built.root.path, "web") == [b"1", b"2", b"4", b"5", b"6", b"7"]
        assert_whole(built)


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
    built.cut(seal=True)
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
    built.cut(seal=True)
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
    built.lines("web", [b"x"], cut=True)
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
