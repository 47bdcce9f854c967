"""Metrics of the daemon and the sidecars under their units, inside the sandbox."""

from __future__ import annotations

import units
from endpoint import samples_of
from machine import Machine
from running import eventually


def scraped(machine: Machine, port: int) -> dict[tuple[str, ...], float]:
    """The samples that a program on the machine answers; none before it listens."""
    fetch = f"import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:{port}/metrics').read().decode())"
    return samples_of(machine.run("python3", "-c", fetch, check=False).stdout)


def test_units_export_what_the_directory_shows(machine: Machine) -> None:
    """The daemon may start a process that reads it, and a drop-in has wald-reclaim serve its own numbers."""
    units.install(machine)
    units.drop_in(machine, "wald-reclaim.service", '[Service]\nEnvironment="OPTIONS=--metrics 127.0.0.1:9465"\n')
    machine.run("systemctl", "start", "wald.service", "wald-reclaim.service")
    machine.run("wald", "--root", "/var/lib/wald", "route", "add", "r")

    eventually(lambda: scraped(machine, 9464).get(("wald_group_lag_records", "r", "processed")) == 0)
    eventually(lambda: ("wald_reclaim_last_pass_timestamp_seconds",) in scraped(machine, 9465))
    assert scraped(machine, 9464)["wald_measurement_failures_total",] == 0
