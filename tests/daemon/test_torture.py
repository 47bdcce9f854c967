"""Storms of faults lose and double nothing, and verification under load reports no damage."""

import os
import threading
from pathlib import Path

import pytest
from contents import errors
from endurance import CUTS, KILLS, MIXED, Storm, endure
from running import Client, Start, eventually, output_of

from wald.files.layout import Root
from wald.files.listing import list_segments
from wald.format.names import Kind


@pytest.mark.parametrize(
    ("storm", "seconds"),
    [
        pytest.param(KILLS, 3, id="kills"),
        pytest.param(MIXED, 20, id="mixed", marks=pytest.mark.slow),
        pytest.param(CUTS, 20, id="cuts", marks=pytest.mark.slow),
    ],
)
def test_a_storm_loses_and_doubles_nothing(tmp_path: Path, storm: Storm, seconds: float) -> None:
    tally = endure(tmp_path, storm, seconds=seconds, seed=1)

    assert tally.wrong == [], str(tally)
    assert tally.counts["acknowledged"] == tally.counts["read"] > 0
    assert tally.faults
    assert tally.counts["cuts"] > 0
    assert (tally.counts["lost"], tally.counts["doubled"]) == (0, 0)


@pytest.mark.parametrize("enough_sealed", [12, pytest.param(60, marks=pytest.mark.slow)])
def test_verifying_under_load_never_tells_of_damage(root: Path, start: Start, enough_sealed: int) -> None:
    """Batches over the socket and records in pieces out of a FIFO, in segments that last for some milliseconds."""
    daemon = start(segment_max_bytes="256KiB")
    output_of("route", "add", "web", "--root", root)
    output_of("route", "add", "long", "--fifo", "--root", root)
    done = threading.Event()

    def publish() -> None:
        with Client(daemon.socket_path) as client:
            while not done.is_set():
                client.publish("web", (b"q" * 59 + b"\n") * 100)
                assert client.reply().startswith("OK")

    def write() -> None:
        fifo = os.open(root / "routes" / "long" / "in", os.O_WRONLY)
        while not done.is_set():
            os.write(fifo, b"z" * 200_000 + b"\n")
        os.close(fifo)

    writers = [threading.Thread(target=target, daemon=True) for target in (publish, write)]
    for writer in writers:
        writer.start()
    found: list[str] = []

    def enough() -> bool:
        found.extend(errors(root))
        return bool(found) or sum(s.kind is Kind.SEALED for s in list_segments(Root(root)).segments) >= enough_sealed

    try:
        eventually(enough)
    finally:
        done.set()
    for writer in writers:
        writer.join()
    assert found == []
