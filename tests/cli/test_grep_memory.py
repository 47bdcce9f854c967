"""The memory of ``wald grep``: it is that of a few frames and portions, however long the log is."""

from __future__ import annotations

import random
import re
import subprocess
from pathlib import Path

import pytest
from logs import Built
from running import command

LOG_BYTES = 160 << 20
MEMORY_MAX_BYTES = 128 << 20


def memory_bytes(pid: int) -> int:
    """What a process and its children have resident; what several share is counted once (proportional set size)."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    found = 0
    for each in (str(pid), *children):
        try:
            rollup = Path(f"/proc/{each}/smaps_rollup").read_text()
        except (FileNotFoundError, ProcessLookupError):  # it has just ended
            continue
        found += sum(int(kib) << 10 for kib in re.findall(r"^Pss:\s+(\d+) kB", rollup, re.MULTILINE))
    return found


@pytest.mark.slow
def test_its_processes_stay_within_128_mib_where_every_record_is_found(tmp_path: Path) -> None:
    log = Built(tmp_path / "log", segment_max_bytes=32 << 20)
    chance = random.Random(1)
    lines = [b"%d GET /%x.html 200" % (chance.getrandbits(40), chance.getrandbits(200)) for _ in range(1500)]
    for number in range(LOG_BYTES // sum(map(len, lines))):
        log.lines("a", lines)
        if number % 256 == 255:
            log.cut()
    log.cut()
    log.seal()
    log.crash()

    seen: list[int] = []
    words = command("grep", "--root", log.root.path, "--jobs", 2, "GET")
    with subprocess.Popen(words, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        while process.stdout.read(1 << 20):
            seen.append(memory_bytes(process.pid))

    assert process.returncode == 0
    assert len(seen) > LOG_BYTES >> 20
    assert max(seen) <= MEMORY_MAX_BYTES, seen
