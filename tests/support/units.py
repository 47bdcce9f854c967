"""The unit files of ``systemd/`` on a machine, installed like a package; the programs are those of this checkout."""

import shutil
import sys
from pathlib import Path

from machine import Machine

CHECKOUT = Path(__file__).parents[2]
UNITS = CHECKOUT / "systemd"
SERVICES = sorted(path.name for path in UNITS.glob("*.service"))
PROGRAMS = ("wald", "wald-archive", "wald-audit", "wald-drain", "wald-gate", "wald-reclaim")
PYTHON = "/usr/lib/wald/bin/python3"  # which imports wald
_PLACES = {
    "*.service": "/lib/systemd/system",
    "*.socket": "/lib/systemd/system",
    "*.timer": "/lib/systemd/system",
    "sysusers.d/*.conf": "/usr/lib/sysusers.d",
    "tmpfiles.d/*.conf": "/usr/lib/tmpfiles.d",
    "sysctl.d/*.conf": "/usr/lib/sysctl.d",
    "*.toml": "/etc/wald",
}


def install(machine: Machine) -> None:
    """Install everything and create the user and the directory; start nothing."""
    for pattern, place in _PLACES.items():
        machine.path(place).mkdir(parents=True, exist_ok=True)
        for path in UNITS.glob(pattern):
            shutil.copy(path, machine.path(place) / path.name)
    _install_programs(machine)
    machine.sh("systemd-sysusers; systemd-tmpfiles --create wald.conf; systemctl daemon-reload")


def drop_in(machine: Machine, unit: str, text: str) -> None:
    """Change a unit with a drop-in, which replaces an earlier one; start nothing."""
    directory = machine.path(f"/etc/systemd/system/{unit}.d")
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "test.conf").write_text(text)
    machine.run("systemctl", "daemon-reload")


def _install_programs(machine: Machine) -> None:
    """Write scripts to /usr/bin. The interpreter and the checkout may be in a home, which the units do not see."""
    places = {Path(sys.base_prefix): "/srv/test-python", CHECKOUT: "/srv/test-checkout"}
    for path, place in places.items():
        machine.sh(f"mkdir -p {place}; mountpoint -q {place} || mount --bind {path} {place}")
    python = _moved(Path(sys.executable).resolve(), places)
    modules = ":".join(_moved(Path(path), places) for path in sys.path if path)
    environment = f"LD_LIBRARY_PATH={_moved(Path(sys.base_prefix) / 'lib', places)} PYTHONPATH={modules}"
    scripts = {f"/usr/bin/{name}": _moved(Path(sys.executable).with_name(name), places) for name in PROGRAMS}
    for name, script in {**scripts, PYTHON: ""}.items():
        path = machine.path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.write_text(f'#!/bin/sh\n{environment} exec {python} {script} "$@"\n')
        path.chmod(0o755)


def _moved(path: Path, places: dict[Path, str]) -> str:
    for old, new in places.items():
        if path.is_relative_to(old):
            return str(new / path.relative_to(old))
    return str(path)
