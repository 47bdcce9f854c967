"""A killed shrink leaves two forms of a segment; a record that is intact in either is never lost."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest
from faults import Died
from logs import Built
from reclaiming import reclaim
from running import wald

from wald.checking.checker import Level
from wald.checking.verifier import verify
from wald.files.disk import Disk
from wald.format.names import WHOLE_SUFFIX, Kind

BYTES = random.Random(0).randbytes(1 << 20).replace(b"\n", b"-")


class Killed(Disk):
    """The process ends as soon as the shrunk form has its name."""

    def rename(self, source: Path, target: Path) -> None:
        super().rename(source, target)
        if source.name.endswith(".shrunk.tmp"):
            raise Died


@pytest.fixture
def built(tmp_path: Path) -> Built:
    """A sealed segment in both forms: ten batches, of which the second and the last but one are of the route stuck."""
    made = Built(tmp_path / "log")
    for i in range(10):
        made.lines("stuck" if i in (1, 8) else "web", [BYTES[6000 * i : 6000 * (i + 1)]])
    made.cut()
    made.lines("web", [b"newest"])
    made.seal()
    made.log.set_cursor("web", made.last)
    with pytest.raises(Died):
        reclaim(made, disk=Killed(), shrink_pinned=True)
    assert whole(made).exists()
    made.crash()
    return made


def whole(built: Built) -> Path:
    path = built.path(1, Kind.SEALED)
    return path.with_name(path.name + WHOLE_SUFFIX)


def damage(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(bytes(data))


def values(built: Built, route: str, *, unread: bool = False) -> list[bytes]:
    batches = built.log.batches(route, "cursor" if unread else 1)
    return [record.value for batch in batches for record in batch.records()]


def errors(built: Built) -> list[str]:
    return [str(found) for found in verify(built.root) if found.level is Level.ERROR]


def index_offset(path: Path) -> int:
    return path.read_bytes().rindex(b"\x57\x2a\x4d\x18") + 30


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("in_index", [False, True])
def test_repair_puts_the_whole_form_back(built: Built, *, in_index: bool, rewound: bool) -> None:
    path = built.path(1, Kind.SEALED)
    damage(path, index_offset(path) if in_index else 3000)
    if rewound:
        built.log.set_cursor("web", 0, rewind=True)
    done = wald("repair", "--root", built.root.path)

    assert (done.returncode, done.stderr) == (0, b""), done.stdout
    assert not whole(built).exists()
    assert len(values(built, "web")) == 9
    assert len(values(built, "stuck")) == 2
    reclaim(built, shrink_pinned=True)
    assert len(values(built, "stuck")) == 2
    assert len(values(built, "web", unread=True)) == (9 if rewound else 0)
    assert errors(built) == []


def test_reclaim_does_not_trust_a_form_that_was_damaged_meanwhile(built: Built) -> None:
    damage(built.path(1, Kind.SEALED), 3000)
    reclaim(built, shrink_pinned=True)

    assert not whole(built).exists()
    assert len(values(built, "stuck")) == 2
    assert errors(built) == []


def test_reclaim_keeps_the_good_form_beside_a_damaged_old_one(built: Built) -> None:
    """And repair clears the damaged one away."""
    damage(whole(built), 3000)
    reclaim(built, shrink_pinned=True)
    assert whole(built).exists()
    assert len(values(built, "stuck")) == 2

    done = wald("repair", "--root", built.root.path)
    assert done.returncode == 0, done.stdout
    assert not whole(built).exists()
    assert len(values(built, "stuck")) == 2
    reclaim(built, shrink_pinned=True)
    assert errors(built) == []


def test_a_form_of_a_segment_that_was_reclaimed_meanwhile_is_removed(built: Built) -> None:
    kept = whole(built).with_name("kept")
    shutil.move(whole(built), kept)
    built.log.set_cursor("stuck", 10)
    reclaim(built)
    assert not built.path(1, Kind.SEALED).exists()
    shutil.move(kept, whole(built))
    reclaim(built, shrink_pinned=True)

    assert not [path.name for path in built.root.segments.iterdir() if "zst" in path.name]


def test_it_may_not_be_deleted_by_hand(built: Built) -> None:
    done = wald("inspect", whole(built))
    assert b"delete it?  no" in done.stdout.replace(b"    ", b"  "), done.stdout
    assert (
        f"{whole(built).name}: left by an interrupted shrinking"
        in wald("verify", "--root", built.root.path).stdout.decode()
    )


def test_a_later_pass_keeps_the_new_form_if_nobody_needs_the_old_one(built: Built) -> None:
    """Also one that shrinks nothing itself."""
    path = built.path(1, Kind.SEALED)
    shrunk = path.read_bytes()
    reclaim(built)
    assert path.read_bytes() == shrunk
    assert not whole(built).exists()
