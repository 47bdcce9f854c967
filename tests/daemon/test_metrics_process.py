"""Metrics of the directory come from a separate process, which does not run for every scrape."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from endpoint import free_address, get, metrics
from running import Client, Daemon, eventually

from wald.daemon.metrics import MetricsProcess

Start = Callable[..., Daemon]


def test_metrics_have_what_the_directory_shows_and_scrapers_share_a_measurement(start: Start) -> None:
    """The next one is due some seconds after it, and not for each that asks."""
    address = free_address()
    daemon = start(metrics=address)
    daemon.ask("ROUTE ADD r")
    with Client(daemon.socket_path) as client:
        assert client.ask(b"PUB r 6\none\n2\n") == "OK 1 2"
    eventually(lambda: metrics(address).get("wald_group_lag_records") == 2, timeout=60)
    found = metrics(address)

    assert found["wald_until_full_bytes"] > 0
    assert found["wald_measurement_failures_total"] == 0
    assert len({metrics(address)["wald_measured_timestamp_seconds"] for _ in range(20)}) == 1


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
        with Client(daemon.socket_path) as client:
            assert client.ask(b"PUB r 2\nx\n") == "OK 1 1"
        threads = len(os.listdir(f"/proc/{daemon.process.pid}/task"))
        assert threads < 20
    finally:
        for scraper in scrapers:
            scraper.close()
    assert daemon.stop() == 0
    assert "Traceback" not in daemon.log
