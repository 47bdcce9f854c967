"""Promises to contributors: documents and configurations of other programs agree with the Makefile."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import wald

ROOT = Path(__file__).parents[1]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_the_checks() -> None:
    lines = (ROOT / ".ci/run").read_text() + (ROOT / ".ci/bare").read_text()
    steps = re.findall(r"^ *(?:make|\.ci/tests) (\S+)", lines, re.MULTILINE)

    assert {"check", "docs", "test-wheel", "test", "test-slow", "test-spark"} <= set(steps)


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_it_names_is_there(document: str) -> None:
    named = re.findall(
        r"`((?:tests|wald|scripts|docs|sidecars|\.ci)/[\w/.-]+|[A-Z]+\.md)", (ROOT / document).read_text()
    )

    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_part_of_a_page_that_it_names_is_there(document: str) -> None:
    named = re.findall(r'"([^"]+)" in `([^`]+\.md)`', (ROOT / document).read_text())

    assert [part for part, page in named if f"# {part}\n" not in (ROOT / page).read_text()] == []
    assert named or document == "CONTRIBUTING.md"


def test_the_version_is_that_of_the_newest_release() -> None:
    releases = re.findall(r"^## \[(\d[^]]*)\] - (\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)

    assert releases[0][0] == wald.__version__
    assert releases == sorted(releases, key=lambda release: release[1], reverse=True)


def test_the_modules_of_the_benchmarks_can_be_imported() -> None:
    """No other test loads most of these modules, and the type checker skips them."""
    modules = sorted(f"benchmarks.{path.stem}" for path in (ROOT / "scripts/benchmarks").glob("[!_]*.py"))
    assert "benchmarks.ledgers" in modules

    importing = f"import sys; sys.path.insert(0, 'scripts'); import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", importing], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
