"""A reader reports bad bytes and reads what follows them; nothing that was not written is read."""

import os
import shutil
from pathlib import Path

import pytest
from logs import Built
from reading import moment, three_forms, values

from wald.errors import Damaged
from wald.format.names import Kind
from wald.segments.sealed_file import FRAME_BYTES, SealedFile


def spoil(path: Path, offset: int, length: int = 1) -> None:
    """Change bytes of a file."""
    data = bytearray(path.read_bytes())
    for i in range(offset, offset + length):
        data[i] ^= 0x55
    path.write_bytes(data)


class TestDamage:
    """Bad bytes are reported, and what follows them is read."""

    @pytest.mark.parametrize("base", [1, 3])
    def test_a_file_that_is_listed_and_not_there(self, built: Built, base: int) -> None:
        """After half a restore, listing the directory again does not help, so the reader must not retry for ever."""
        three_forms(built)
        path = built.path(base, Kind.SEALED if base == 1 else Kind.RAW)
        path.unlink()
        path.symlink_to("/nowhere")
        damage: list[Damaged] = []
        assert len(values(built, on_damage=damage.append)) == 4
        assert [str(path) in error.message for error in damage] == [True]
        with pytest.raises(Damaged, match=path.name):
            values(built, start=moment(base + 0.5))

    def test_the_directory_of_the_segments(self, built: Built) -> None:
        three_forms(built)
        shutil.rmtree(built.root.segments)
        for start in ("earliest", "end", 1, moment(1)):
            with pytest.raises(Damaged, match="is gone"):
                values(built, start=start)

    def frames(self, built: Built) -> None:
        """Write three records, each in a separate sealed frame."""
        for number in range(3):
            built.lines("ab"[number % 2], [b"%d" % number + os.urandom(FRAME_BYTES // 2).hex().encode()])
        built.cut(seal=True)

    def spoil_frame(self, built: Built, sequence: int) -> None:
        path = built.path(1, Kind.SEALED)
        with SealedFile(path) as sealed:
            frame = next(frame for frame in sealed.index.frames if frame.next_sequence > sequence)
        spoil(path, frame.offset + 100, 8)

    def test_a_sealed_frame_is_reported_unless_it_is_of_other_routes(self, built: Built) -> None:
        self.frames(built)
        self.spoil_frame(built, 2)
        damage: list[Damaged] = []
        assert [r.sequence for r in built.log.records(on_damage=damage.append)] == [1, 3]
        assert ["record 2 " in error.message for error in damage] == [True]
        assert [r.sequence for r in built.log.records("a")] == [1, 3]

    def test_a_gap_of_one_sequence(self, built: Built) -> None:
        built.lines("a", [b"1"])
        built.writer.state.next_sequence += 1
        built.lines("a", [b"3"])
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"1", b"3"]
        assert "the sequence has a gap" in damage[0].message

    def test_a_segment_of_another_log(self, built: Built, tmp_path: Path) -> None:
        other = Built(tmp_path / "other")
        for log in (built, other):
            log.lines("a", [b"1"], cut=True)
            log.lines("a", [b"2"])
        built.path(1, Kind.RAW).write_bytes(other.path(1, Kind.RAW).read_bytes())
        damage: list[Damaged] = []
        assert values(built, on_damage=damage.append) == [b"2"]
        assert "another log" in damage[0].message or "belongs to log" in damage[0].message
