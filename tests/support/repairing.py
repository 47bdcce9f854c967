"""A small log with every kind of segment content, and its repair as ``wald repair`` does it."""

import os
import random
from functools import partial
from pathlib import Path

import pytest
from logs import START_NS, Built, Unsynced

from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.uptime import Moment
from wald.repairing import rewrite
from wald.repairing.apply import Repair, planned_repair
from wald.repairing.plan import Plan
from wald.segments.sealed_file import compress_segment
from wald.writing import sealing

FRAME_BYTES = 1500  # so that a segment of a few kilobytes has many frames
ROUTES = "abcpq"


def small_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (sealing, rewrite):
        monkeypatch.setattr(module, "compress_segment", partial(compress_segment, frame_bytes=FRAME_BYTES))


def build(path: Path) -> None:
    """Build five segments, three of them sealed, the last one active; long records in pieces span all of them."""
    built, rng = Built(path), random.Random(5)
    for part in range(5):
        for number in range(30):
            _append(built, rng, b"%d-%d" % (part, number))
        if part < 4:
            built.cut()
        if part == 2:
            built.seal()
    built.crash()


def _append(built: Built, rng: random.Random, name: bytes) -> None:
    text = rng.randbytes(rng.randint(1, 300)).hex().encode()
    match rng.choice("aaaabbcpppqqq"):
        case "a":
            built.lines("a", [name, text])
        case "b":
            built.columns("b", [b"one", b"\n", b""], keys=[b"k", None, b""])
        case "c":
            built.lines("c", [text] * 3)
        case route if route not in built.writer.state.open_records:
            built.piece(route, rng.choice([b"", b"w1\nw2\n"]) + text, begins=True, ends=False)
        case route:
            ends = rng.random() < 0.5
            built.piece(route, rng.choice([b"end\n", b"end\nnext\n"]) if ends else text, begins=False, ends=ends)


def repair(root: Path, *, accept_loss: bool = True, disk: Disk | None = None) -> Plan:
    """Do the work of ``wald repair`` between taking and releasing the locks."""
    repairing = Repair(Root(root), disk or Unsynced(), 7, lambda: START_NS, lambda: Moment("boot", 1))
    with planned_repair(Root(root)) as (plan, facts):
        for act in plan.actions:
            if accept_loss or not act.loses_data:
                repairing.apply(act, facts)
        return plan


def snapshot(root: Path) -> dict[str, tuple[bytes, int]]:
    """Return every file and directory, with its bytes and modification time."""
    paths = [root, *root.rglob("*")]
    return {
        os.fspath(path): (path.read_bytes() if path.is_file() else b"", path.stat().st_mtime_ns)
        for path in paths
        if path.is_file() or path.is_dir()
    }
