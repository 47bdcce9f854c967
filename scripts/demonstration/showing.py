"""Running programs and showing their output; failed expectations."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
SEGMENT_BYTES = 8 << 20  # small, so that there is something to see; the default is 64 MiB
PATIENCE_SECONDS = 60.0
WALD = [sys.executable, "-m", "wald"]
ENVIRONMENT = os.environ | {
    "PYTHONPATH": os.pathsep.join(
        filter(None, [str(REPOSITORY), str(REPOSITORY / "sidecars"), os.environ.get("PYTHONPATH", "")])
    ),
    "WALD_SEGMENT_MAX_BYTES": str(SEGMENT_BYTES),
    "WALD_FREE_SPACE_MIN": "0",
}
_SPARK = ("audit", "compact", "export")
_WIDTH = 110
_COLOUR = sys.stdout.isatty() and "NO_COLOR" not in os.environ


class Failed(Exception):
    """Failed expectation."""


def sealed_segments(root: Path) -> list[Path]:
    return sorted((root / "segments").glob("*.wal.zst"))


def wald_command(
    root: Path, *words: str, program: str = "wald", code: int = 0, binary: bool = False
) -> Any:  # bytes if ``binary``, else str
    name = program.removeprefix("wald-")
    module = "wald" if program == "wald" else f"wald_spark.{name}" if name in _SPARK else f"wald_{name}"
    line = [sys.executable, "-m", module, *words]
    done = subprocess.run(line, env=ENVIRONMENT | {"WALD_ROOT": str(root)}, capture_output=True, check=False)
    expect(done.returncode == code, f"{program} {' '.join(words)}: exit code {done.returncode}: {done.stderr.decode()}")
    return done.stdout if binary else done.stdout.decode()


def show(root: Path, *words: str, program: str = "wald", lines_max: int = 9, code: int = 0) -> None:
    print(paint(f"  $ {program} {' '.join(words)}", "36"))
    lines = wald_command(root, *words, program=program, code=code).splitlines()
    if len(lines) > lines_max:
        lines[lines_max // 2 : -(lines_max // 2)] = ["…"]
    for line in lines:
        print("    " + (line if len(line) <= _WIDTH else line[: _WIDTH - 1] + "…"))


def title(words: str, about: str = "") -> None:
    print(f"\n{paint(words, '1')}" + (f" - {about}" if about else ""))


def expect(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Failed(otherwise)


def megabytes(length: int) -> str:
    return f"{length / 1e6:.1f} MB"


def rate(length: int, seconds: float) -> str:
    return f"{length / 1e6 / seconds:.0f} MB/s"


def since(moment: float) -> str:
    return f"{time.monotonic() - moment:.2f} s"


def paint(words: str, code: str) -> str:
    return f"\033[{code}m{words}\033[0m" if _COLOUR else words
