"""Without the packages of the extra ``spark``, programs name the missing one; ``--help`` needs none of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import programs
import pytest
from logs import Built
from running import refused

PROGRAMS = ["export", "compact", "audit"]
PACKAGES = ["pyspark", "pyarrow", "numpy", "pandas"]


def without(package: str, program: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    """Run a program in a Python that cannot import ``package``."""
    script = f"import sys; sys.modules[{package!r}] = None; from wald_spark.{program}.command import main; main()"
    line = [sys.executable, "-c", script, *map(str, arguments)]
    return subprocess.run(line, capture_output=True, check=False, timeout=300)


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_missing_package_is_named_with_the_extra_that_has_it(tmp_path: Path, program: str, package: str) -> None:
    if program == "audit":
        programs.program("java")
    built = Built(tmp_path / "log")
    built.lines("a", [b"one"])
    out = ("--out", tmp_path / "out") if program != "audit" else ()
    code, message, hint = refused(without(package, program, "--root", built.root.path, *out))

    assert (code, hint) == (3, "in a clone of wald: pip install '.[spark]'")
    assert f"there is no {package}" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_needs_no_package(program: str) -> None:
    assert without("pyspark", program, "--help").returncode == 0
