"""HTTP endpoints for scrapers and load balancers; metrics of the directory come from a separate process."""

import http.client
import os
import re
import socket
import struct
from contextlib import ExitStack
from pathlib import Path

import pytest
from endpoint import free_address, get, metrics
from full_disk import fill
from running import TIMEOUT_SECONDS, Client, Start, eventually

from wald.daemon.metrics import Metrics, MetricsProcess, daemon_metrics


@pytest.fixture
def address() -> str:
    """On which no program listens."""
    return free_address()


def test_metrics_move_with_the_log(start: Start, address: str) -> None:
    """Counters and gauges follow the log, and all other names exist from the start.

    They have what the directory shows, too; scrapers share a measurement, the next of which is due some seconds later.
    """
    daemon = start(metrics=address, routes=["r"])
    eventually(lambda: metrics(address)["wald_seal_stalled_seconds"] == 0)  # it has looked for something to seal
    before = metrics(address)
    counted = {metric.name for metric in daemon_metrics(Metrics(), failures=0) if metric.type != "histogram"}
    histograms = ("commit_seconds", "sync_seconds", "round_records", "round_bytes")
    counted |= {f"wald_{name}_{part}" for name in histograms for part in ("sum", "count")}
    counted -= {
        "wald_free_bytes",
        "wald_needed_bytes",
        "wald_connections",
        "wald_recovery",
        "wald_route_over_quota_bytes",
    }
    begins_at_0 = {name: before[name] for name in counted if name in before and before[name] != 0}
    assert begins_at_0 == {"wald_info": 1, "wald_epoch": 1}
    assert counted <= before.keys()

    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB r 6\none\n2\n") == "OK 1 2"
        assert client.ask(b"PUB r 2\nx\n") == "OK 3 3"
        assert client.ask(b"CUT\n") == "OK cut 4"
    eventually(lambda: metrics(address)["wald_sealed_total"] == 1)
    after = metrics(address)
    assert after["wald_head_sequence"] == after["wald_records_total"] == 3
    assert (after["wald_commit_rounds_total"], after["wald_cuts_total"], after["wald_payload_bytes_total"]) == (2, 1, 8)
    sender = after["wald_written_bytes_total"] - 2 * (64 + 8 + 8 + 8)  # the control batch that names it, once
    assert 64 < sender <= 128
    assert after["wald_commit_seconds_count"] == after["wald_sync_seconds_count"] == 2
    assert after["wald_commit_seconds_sum"] > after["wald_sync_seconds_sum"] > 0
    assert (after["wald_round_records_sum"], after["wald_round_bytes_sum"]) == (3, after["wald_written_bytes_total"])
    assert after["wald_sealed_bytes_total"] > 0
    assert after["wald_free_bytes"] > 0
    eventually(lambda: metrics(address).get("wald_group_lag_records") == 3, timeout=60)
    found = metrics(address)
    assert found["wald_until_full_bytes"] > 0
    assert found["wald_measurement_failures_total"] == 0
    assert len({metrics(address)["wald_measured_timestamp_seconds"] for _ in range(20)}) == 1


def test_two_questions_are_answered_and_no_other(start: Start, address: str) -> None:
    """A query changes nothing, HEAD has no body, and a scraper that hangs up in its question is no event.

    Those that say nothing take few descriptors and hold up no other: the oldest of them is hung up on.
    """
    daemon = start(metrics=address)
    host, _, port = address.partition(":")
    for _ in range(3):
        with socket.create_connection((host, int(port))) as scraper:
            scraper.sendall(b"GET /metr")
            # Closing resets the connection instead of ending it.
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    assert get(address, "/healthz") == get(address, "/healthz?x=1") == (200, "ok: head 0\n")
    assert get(address, "/metrics?x=1&name=up")[0] == 200
    for path in ("/", "/metrics/", "/healthz/..", "/favicon.ico"):
        assert get(address, path) == (404, "/metrics or /healthz\n")
    for path, status in (("/healthz", 200), ("/metrics?x=1", 200), ("/nowhere", 404)):
        connection = http.client.HTTPConnection(address, timeout=TIMEOUT_SECONDS)
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (status, b"")
        assert int(answer.headers["Content-Length"]) > 0
        connection.close()
    descriptors = Path(f"/proc/{daemon.process.pid}/fd")
    before = len(list(descriptors.iterdir()))
    with ExitStack() as closing:
        silent = [closing.enter_context(socket.create_connection((host, int(port)))) for _ in range(40)]
        assert get(address, "/healthz") == (200, "ok: head 0\n")
        assert metrics(address)["wald_head_sequence"] == 0
        assert len(list(descriptors.iterdir())) < before + 12
        silent[0].settimeout(TIMEOUT_SECONDS)
        assert silent[0].recv(1) == b""
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log


def test_ipv6_addresses_stand_in_brackets(start: Start) -> None:
    """Without IPv6, the refusal names the address as written."""
    if not socket.has_dualstack_ipv6():
        daemon = start(metrics="[::1]:9464", ready=False)
        assert daemon.wait() == 2
        assert "metrics = '[::1]:9464': " in daemon.log
        return
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as free:
        address = f"[::1]:{free.getsockname()[1]}"
    start(metrics=address)

    assert get(address, "/healthz") == (200, "ok: head 0\n")


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "256.0.0.1:9464", "[::1]"])
def test_an_address_it_cannot_listen_on_is_refused(start: Start, address: str) -> None:
    daemon = start(metrics=address, ready=False)

    assert daemon.wait() == 2
    assert "metrics" in daemon.log
    assert repr(address) in daemon.log
    assert "Traceback" not in daemon.log


DISK_BYTES = 16 << 20


def test_healthy_means_progress(start: Start, disk: Path, address: str) -> None:
    """Without room: degraded as long as nothing waits, unhealthy once something has for too long, and then well."""
    root, idle_address = disk / "log", free_address()
    start(at=disk / "idle", metrics=idle_address, stall_timeout="1s", segment_max_bytes="64KiB")
    daemon = start(at=root, metrics=address, stall_timeout="1s", segment_max_bytes="64KiB", routes=["r fifo"])
    fill(disk / "filler")

    eventually(lambda: daemon.ask("PING") and metrics(address)["wald_degraded"] == 1)
    message = r"degraded: input is not accepted: \d+ bytes are free, \d+ are needed \(others\)\n"
    assert re.fullmatch(message, get(address, "/healthz")[1])
    with (root / "routes/r/in").open("wb", buffering=0) as fifo:
        fifo.write(b"x\n")
        eventually(lambda: get(address, "/healthz")[0] == 503)
        message = get(address, "/healthz")[1]
        assert re.fullmatch(r"stalled: input has waited for \d+ s; the head is at 0\n", message)
        assert get(idle_address, "/healthz")[0] == 200  # idle for as long, but nothing waits

        (disk / "filler").unlink()
        eventually(lambda: get(address, "/healthz") == (200, "ok: head 1\n"))
    after = metrics(address)
    assert (after["wald_degraded"], after["wald_stalled_seconds"]) == (0, 0)
    assert after["wald_disk_wait_seconds_total"] > 1  # it has waited for longer than stall_timeout


def test_a_directory_that_cannot_be_measured_costs_no_other_number(tmp_path: Path) -> None:
    """No old text is shown then: the numbers in it would look like new ones."""
    process = MetricsProcess(tmp_path, lambda: 0)

    assert process.text() == b""
    eventually(lambda: process.failures == 1)


@pytest.mark.slow
def test_scrapers_that_never_read_keep_no_other_from_the_answer(start: Start) -> None:
    """A hundred of them: each has a place until another wants it, and the daemon takes records all the while."""
    address = free_address()
    daemon = start(metrics=address)
    host, _, port = address.partition(":")
    daemon.ask("ROUTE ADD r")
    scrapers = []
    try:
        for _ in range(100):
            scraper = socket.create_connection((host, int(port)))
            scraper.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
            scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            scrapers.append(scraper)
        eventually(lambda: get(address, "/metrics")[0] == 200)
        assert daemon.ask("PUB r 2\nx") == "OK 1 1"
        threads = len(os.listdir(f"/proc/{daemon.process.pid}/task"))
        assert threads < 20
    finally:
        for scraper in scrapers:
            scraper.close()
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
