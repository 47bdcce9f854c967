"""The golden bag: the first release of the archive format applied to a small log."""

import json
from pathlib import Path

import archives
from logs import Built

import wald
from wald_archive.bundle import Origin, Records, bundle
from wald_archive.codecs import Codec

VERSION = 1
FOLDER = Path(__file__).parent / f"archive-v{VERSION}"
MOMENT = "2026-11-21T10:00:00Z"
LOG = "0f1e2d3c-4b5a-6978-8796-a5b4c3d2e1f0"


def sample_log(root: Path) -> Built:
    """Build a log with every kind of record, two routes, a last line without a newline, and a fixed id."""
    root.mkdir(parents=True)
    (root / "log.json").write_text(json.dumps({"log": LOG, "format": 1, "created": MOMENT}))
    built = Built(root)
    built.lines("a", [b"plain", b"carriage\r", b"", b"\x00\xff"])
    built.lines("b", [b"another route"])
    built.columns(
        "a",
        [b"value", b"", b"\x00\xff\n"],
        keys=[b"key", None, b"\xff"],
        headers=[None, b'{"name":"text"}', b"\xff"],
        times_ns=[1_700_000_000_000_000_000, 0, -1],
    )
    built.piece("a", b"a long ", begins=True, ends=False)
    built.piece("a", b"record\nand one more\n", begins=False, ends=True)
    built.piece("a", b"no newline", begins=True, ends=True)
    return built


def log_id_of(built: Built) -> str:
    """Return the log id as the archive writes it."""
    return built.log_id.hex()


def make(folder: Path, root: Path) -> None:
    """Pack the sample log, which is built at ``root``, to ``folder``; uncompressed, so that the bytes do not change."""
    archives.archive(sample_log(root), folder, size=Records(4), moment=MOMENT)


def write(root: Path, path: Path) -> None:
    """Pack the route of an existing root into one bundle at ``path``."""
    log = wald.open(root)
    origin = Origin(log.identity.log_id.hex(), "a", "processed", "wald test", MOMENT)
    with path.open("xb") as file:
        bundle(log.batches("a"), origin=origin, codec=Codec.NONE, after=0, sink=file.write)
