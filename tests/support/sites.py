"""A machine with wald installed and one log in use, for tests that cause failures on it."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import units
from machine import Machine
from running import eventually

LOG = "/var/lib/wald"
SETTINGS = "/etc/wald/wald.toml"
OUT = "/srv/out"
FEED = "/etc/wald/drain/orders"  # the command of wald-drain@orders
_RUNBOOK_SECONDS = 600


class Site:
    """A machine on which nothing runs yet."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.sh = machine.sh

    def install(self) -> None:
        """Install programs, user and units, and add route orders to the settings."""
        units.install(self.machine)
        self.write(SETTINGS, self.text(SETTINGS) + "\n[routes.orders]\nfifo = true\n")

    def start(self, *units: str) -> None:
        """Start the daemon, wait until it answers, and start other units."""
        done = self.machine.run("systemctl", "start", "wald", *units, check=False)
        assert done.returncode == 0, done.stderr + "".join(self.journal(unit) for unit in ("wald", *units))

    def feed(self, program: str) -> None:
        """Have wald-drain@orders feed a shell script, which may write to files in OUT."""
        self.sh(f"install -d -o wald -g wald {OUT}")
        self.write("/etc/systemd/system/wald-drain@orders.service.d/out.conf", f"[Service]\nReadWritePaths={OUT}\n")
        self.write(FEED, f"#!/bin/bash\n{program}\n")
        self.sh(f"chmod 755 {FEED}; systemctl daemon-reload")
        self.start("wald-drain@orders")

    def write(self, path: str, text: str) -> None:
        """Write a file owned by root."""
        self.machine.run("sh", "-c", 'mkdir -p "$(dirname "$0")"; cat > "$0"', path, text=text)

    def copy(self, path: Path, to: str) -> None:
        """Copy a file of this host to the machine."""
        shutil.copy(path, self.machine.path(to))

    def exists(self, path: str) -> bool:
        return self.machine.run("test", "-e", path, check=False).returncode == 0

    def text(self, path: str) -> str:
        """Return a file's contents."""
        return self.machine.run("cat", path).stdout

    def wald(self, *line: object, text: str = "") -> str:
        """Return the output of our program, run by the log's user on the log; ``wald`` itself may be omitted."""
        program = [] if str(line[0]).startswith("wald-") else ["wald"]
        return self.machine.run("env", f"WALD_ROOT={LOG}", *program, *line, user="wald", text=text).stdout

    def append(self, lines: Iterable[object], route: str = "orders") -> None:
        """Send lines, and return once they are durable."""
        self.wald("append", route, text="".join(f"{line}\n" for line in lines))

    def segment(self, lines: Iterable[object]) -> None:
        """Write lines to a separate segment, and seal it."""
        self.append(lines)
        self.wald("cut")
        self.until(f"test $(ls {LOG}/segments/*.wal | wc -l) = 1")

    def read(self, route: str = "orders") -> list[str]:
        """Return the values of a route's records that were not reclaimed."""
        return self.wald("read", route, "--on-missing", "skip").splitlines()

    def journal(self, unit: str = "wald") -> str:
        return self.machine.journal(unit)

    def until(self, condition: str) -> None:
        """Return once a shell condition holds."""
        eventually(lambda: self.machine.run("bash", "-c", condition, check=False).returncode == 0)

    def type(self, script: str) -> str:
        """Return the output of a bash script in root's shell; its commands and their units report failures."""
        # A whole runbook has more time than one command, but ends before the test would hang.
        line = ("timeout", _RUNBOOK_SECONDS, "bash", "-c", f"trap 'echo failed: \"$BASH_COMMAND\" >&2' ERR\n{script}")
        done = self.machine.run(*line, check=False, seconds=2 * _RUNBOOK_SECONDS)
        if done.returncode:
            journal = self.sh("systemctl list-jobs; journalctl --no-pager -o short-precise -n 60", check=False)
            raise AssertionError(f"exit {done.returncode}\n{done.stdout[-4000:]}{done.stderr}\n{journal}")
        return done.stdout
