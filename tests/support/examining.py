"""``wald doctor --json`` as a process, and the files it leaves."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running import command, run


@dataclass(frozen=True)
class Examined:
    """Output and exit code."""

    code: int
    printed: dict[str, Any]

    @property
    def checks(self) -> dict[str, dict[str, Any]]:
        """``Any``: it is JSON."""
        return {check["check"]: check for check in self.printed["checks"]}

    def outcome(self, check: str) -> str:
        return str(self.checks[check]["outcome"])

    def message(self, check: str) -> str:
        return str(self.checks[check]["message"])

    def measured(self, check: str) -> dict[str, Any]:
        return dict(self.checks[check]["measured"])

    @property
    def failed(self) -> set[str]:
        return {name for name, check in self.checks.items() if check["outcome"] == "fail"}


def examine(
    root: Path, *arguments: object, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
) -> Examined:
    """Run it to completion."""
    done = run([*prefix, *command("doctor", "--json", "--root", root, *arguments)], env=env)
    assert done.stdout, done.stderr.decode()
    return Examined(done.returncode, json.loads(done.stdout))


def scratch_directories(directory: Path) -> list[Path]:
    """Return the scratch directories of doctors that are running or were killed."""
    return sorted(directory.glob("wald-doctor-*"))
