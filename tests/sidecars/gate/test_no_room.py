"""A client whose records do not fit now learns when to retry, and never that they are stored."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from asking import CHUNK, stat
from contents import values
from full_disk import fill, small_file_system
from gating import Answer, Gate
from running import Daemon, eventually
from users import MEMBER, OWNER, daemon_of, needs_root

pytestmark = pytest.mark.slow  # a gate retries for 15 s
BUSY, CURSOR = "/v1/routes/busy/records", "/v1/routes/busy/cursors/slow"
FULL = r"the disk is full, so input waits; other files fill it; [0-9.]+ \w+ are free, [0-9.]+ MiB are needed"
QUOTA = '[routes.busy]\npinned_max_bytes = 1000\non_pinned = "{}"\n[routes.other]\n'


@contextmanager
def daemon_with(path: Path, settings: str) -> Iterator[Daemon]:
    config = path / "wald.toml"
    config.write_text(settings)
    with Daemon(path / "log", "--config", config) as daemon:
        yield daemon


def refusal(gate: Gate, status: int, code: str, path: str = BUSY) -> Answer:
    answer = gate.post(path, b"refused\n")
    assert (answer.status, answer.json()["code"]) == (status, code), answer.body
    assert int(answer.headers["retry-after"]) >= 1
    assert "stored" not in answer.json()
    return answer


@pytest.mark.parametrize("frame_timeout", ["1s", "30s"])
def test_a_route_inside_a_long_line_of_its_fifo_is_429(tmp_path: Path, frame_timeout: str) -> None:
    """The response is the same whether the daemon reports the incomplete line or still waits for its end."""
    settings = f'frame_timeout = "{frame_timeout}"\n[routes.busy]\nfifo = true\n[routes.other]\n'
    with daemon_with(tmp_path, settings) as daemon, Gate(daemon.root) as gate:
        with (daemon.root / "routes/busy/in").open("wb", buffering=0) as fifo:
            fifo.write(b"l" * CHUNK)
            eventually(lambda: stat(daemon)["busy"] == ["busy"])
            with ThreadPoolExecutor(1) as threads:
                refused = threads.submit(refusal, gate, 429, "busy")
                assert gate.post("/v1/routes/other/records", b"taken\n").status == 200
                assert not refused.done()
                assert "in the middle of a long line for route busy" in refused.result().json()["detail"]
            fifo.write(b"end\n")
            eventually(lambda: gate.post(BUSY, b"taken\n").status == 200)
        assert "Traceback" not in gate.log


@pytest.mark.parametrize("policy", ["reject", "block"])
def test_a_route_over_its_quota_holds_up_no_other(tmp_path: Path, policy: str) -> None:
    """The daemon either rejects such requests or blocks them and all later ones on the connection."""
    with daemon_with(tmp_path, QUOTA.format(policy)) as daemon, Gate(daemon.root) as gate:
        gate.put(CURSOR, {"sequence": 0})
        gate.post(BUSY, b"x" * 2000)
        eventually(lambda: stat(daemon)["over_quota"])
        with ThreadPoolExecutor(4) as threads:
            refused = [threads.submit(refusal, gate, 503, "unavailable") for _ in range(4)]
            taken = 0
            while not all(each.done() for each in refused):
                assert gate.post("/v1/routes/other/records", b"taken\n").status == 200
                taken += 1
            assert all("over its quota" in each.result().json()["detail"] for each in refused)
            assert taken > 20
        assert b"refused" not in values(daemon.root, "busy")


def test_what_waits_for_a_quota_is_stored_once_when_a_group_has_read(tmp_path: Path) -> None:
    with daemon_with(tmp_path, QUOTA.format("block")) as daemon, Gate(daemon.root) as gate:
        gate.put(CURSOR, {"sequence": 0})
        gate.post(BUSY, b"x" * 2000)
        eventually(lambda: stat(daemon)["over_quota"])
        with ThreadPoolExecutor(9) as threads:
            waiting = [threads.submit(gate.post, BUSY, b"waited-%d\n" % number) for number in range(8)]
            assert gate.post("/v1/routes/other/records", b"taken\n").status == 200
            assert not any(each.done() for each in waiting)
            assert gate.put(CURSOR, {"sequence": 1}).status == 200
            assert {each.result().status for each in waiting} == {200}
        assert sorted(values(daemon.root, "busy")[1:]) == [b"waited-%d" % number for number in range(8)]


@pytest.mark.parametrize("on_full", ["reject", "block"])
def test_a_full_disk_is_503_and_what_was_refused_can_be_sent_once_there_is_room(tmp_path: Path, on_full: str) -> None:
    with small_file_system(tmp_path / "disk", 24 << 20) as disk:
        with daemon_with(disk, f'on_full = "{on_full}"\n[routes.busy]\n') as daemon, Gate(daemon.root) as gate:
            assert gate.post(BUSY, b"first\n").status == 200
            fill(disk / "filler")
            eventually(lambda: stat(daemon)["degraded"])
            eventually(lambda: re.search(FULL, gate.get("/").body.decode()))
            refusal(gate, 503, "disk")
            (disk / "filler").unlink()
            eventually(lambda: gate.post(BUSY, b"again\n").status == 200)
        assert b"again" in values(disk / "log", "busy")


@needs_root
def test_a_cut_too_soon_waits_until_it_may(tmp_path: Path) -> None:
    """The daemon rejects another cut for one second, so the gate retries it."""
    with daemon_of(OWNER, "[routes.busy]\n") as daemon, Gate(daemon.root, prefix=MEMBER.prefix) as gate:
        for _ in range(2):
            assert gate.post(BUSY, b"x\n").status == 200
            answer = gate.post("/v1/cut")
            assert (answer.status, answer.json()["cut"]) == (200, True)
