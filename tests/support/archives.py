"""Archives for tests: packed, verified and restored in this process; and ``wald-archive`` as a process."""

import shutil
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from faults import Died, DyingDisk
from logs import Built, Unsynced
from running import refused, run

import wald
from wald.checking.checker import Level
from wald.files.disk import Disk
from wald.files.layout import Root
from wald.files.ledger_read import read_ledger
from wald.files.ledger_write import Ledger
from wald.format.names import DEFAULT_GROUP
from wald_archive.bundle import Bundle, Bytes, Contents, Origin, PartFacts, Records, Size
from wald_archive.codecs import Codec
from wald_archive.ledger import Recorded, Request, recorded_at
from wald_archive.lookup import runs_of
from wald_archive.manifest import BundleEntry, Manifest, Previous
from wald_archive.objects import Destination, open_destination
from wald_archive.pack import Engine, Packed, Packer, local_bundles
from wald_archive.verify import Finding, verify

MOMENT = "2026-11-21T10:00:00Z"
SOFTWARE = "wald test"


def archive(
    source: Built | Path,
    place: Path | str,
    route: str = "a",
    *,
    size: Size | None = None,
    codec: Codec = Codec.NONE,
    group: str = DEFAULT_GROUP,
    disk: Disk | None = None,
    moment: str = MOMENT,
    software: str = SOFTWARE,
    to: int | None = None,
    engine: Engine | None = None,
) -> list[Packed]:
    """Pack all records of a log, or a root, that the group has not processed into one bag; the clock is fixed."""
    log = wald.open(source) if isinstance(source, Path) else source.log
    disk = disk or Unsynced()
    ledger = Ledger(log.root.ledger / "archive.jsonl", disk, owner="wald-archive")
    destination = open_destination(str(place), disk)
    engine = engine or partial(local_bundles, log, destination)
    try:
        packer = Packer(log, disk, ledger, destination, engine, now_ns=lambda: 1, moment=lambda: moment)
        return list(packer.archive(Request(route, group, size or Bytes(1 << 20), codec, software, to)))
    finally:
        ledger.close()


def interrupt(source: Built | Path, place: Path, step: int = 12, *, part: float = 0.0, **options: Any) -> bool:
    """Archive in bundles of seven records, and die at a step; return False if the run ended before."""
    disk = DyingDisk(step, part=part)
    given: dict[str, Any] = {"size": Records(7), "disk": disk} | options
    try:
        archive(source, place, **given)
    except Died:
        disk.abandon()
        return True
    return False


def findings(*places: Path | str | Destination, root: Root | None = None) -> list[Finding]:
    """Return all findings of a verification of ``places``."""
    destinations = [
        place if not isinstance(place, str | Path) else open_destination(str(place), Disk()) for place in places
    ]
    reported = [Recorded() for _ in destinations]
    if root is not None:
        reported = [recorded_at(ledger_lines(root), destination.address) for destination in destinations]
    return list(verify(destinations, reported, on_bytes=lambda _: None))


def errors(*places: Path | str, root: Root | None = None) -> list[tuple[str, str]]:
    """Return the errors: the file (in its bag, or in the archive) and the reason."""
    return [(found.file, found.message) for found in findings(*places, root=root) if found.level is Level.ERROR]


def ledger_lines(root: Root) -> list[dict[str, object]]:
    """Return the archive's ledger, whose chain must be intact."""
    decoded = read_ledger(root.ledger / "archive.jsonl")
    assert decoded.broken_lines == []
    return decoded.entries


def bags(place: Path) -> list[Path]:
    """Return every bag, by route and sequence."""
    return sorted(path for path in place.glob("*/*") if path.is_dir())


def files(place: Path) -> dict[str, bytes]:
    """Return every file below a directory."""
    return {str(path.relative_to(place)): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def restored(
    place: Path | str, route: str = "a", first: int = 1, last: int | None = None, *, as_json: bool = False
) -> bytes:
    """Return the records restored from the archive."""
    destination = open_destination(str(place), Disk())
    return b"".join(run.lines(as_json=as_json) for run in runs_of(destination, route, first, last))


def copied(place: Path, to: Path) -> Path:
    """Return a copy that a test may damage."""
    shutil.copytree(place, to)
    return to


def command(*arguments: object) -> list[str]:
    """Return the command line of ``wald-archive ARGUMENTS`` under this interpreter."""
    return [sys.executable, "-m", "wald_archive", *map(str, arguments)]


def wald_archive(*arguments: object, env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[bytes]:
    """Run it to completion; the exit code and stderr are not checked."""
    return run(command(*arguments), env=env)


def output_of(*arguments: object, env: Mapping[str, str] | None = None) -> bytes:
    """Return the stdout of a run that succeeds without warnings."""
    done = wald_archive(*arguments, env=env)
    assert (done.returncode, done.stderr) == (0, b""), done.stderr.decode()
    return done.stdout


def refusal_of(*arguments: object, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Return exit code, message and hint of a failing run; it must print one line and one hint, no traceback."""
    return refused(wald_archive(*arguments, env=env))


def manifest(
    *,
    log: str,
    first: int,
    last: int,
    route: str = "a",
    group: str = "processed",
    after: int = 0,
    previous: Previous | None = None,
    digest: str = "",
) -> Manifest:
    """Return a manifest of records ``first`` to ``last`` without gaps; the default digest is derived from ``first``."""
    count = last - first + 1
    contents = Contents(first, last, after, count, 2 * count, 1, 2, (PartFacts("x", first, last, count, 2 * count),))
    sha256 = digest * 64 if digest else f"{first:064x}"
    origin = Origin(log, route, group, "wald test", "2026-11-21T10:00:00Z")
    bundle = Bundle(f"{route}-{first:020d}.tar", contents, 10240, sha256, sha256)
    return Manifest(origin, Codec.NONE, (BundleEntry(bundle, previous),))
