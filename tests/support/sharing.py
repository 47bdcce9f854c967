"""Distribution of tests among workers: one at a time, but tests that share a fixture of their file together.

This way no worker ends with a long file, and slow fixtures are set up once. The scheduler collects no tests, and reads
the fixtures from the source.
"""

import re
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from xdist.scheduler.loadscope import LoadScopeScheduling

_TESTS = Path(__file__).parents[1]
_FIXTURE = re.compile(r"^@pytest\.fixture(\(.*\))?\ndef (\w+)\(([^)]*)\)", re.MULTILINE)
_WIDE = re.compile(r"scope=\"(class|module|package)\"")


class ByFixtures(LoadScopeScheduling):  # type: ignore[misc]
    """Scheduler whose unit is a file if :func:`shares`, or else a test."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _is_shared(file) else nodeid

    def _pending_of(self, workload: dict[str, dict[str, bool]]) -> int:
        """Drop complete units: after each test, xdist asks for everything that a worker was ever given."""
        for scope in [scope for scope, unit in workload.items() if all(unit.values())]:
            del workload[scope]
        return sum(list(unit.values()).count(False) for unit in workload.values())


@cache
def _is_shared(file: str) -> bool:
    return shares(_TESTS.parent / file)


Node = TypeVar("Node")


def begins_elsewhere(nodes: list[Node], config: pytest.Config) -> list[Node]:
    """Return ``nodes`` rotated differently in each worker of a run, so that only one of them compiles each file."""
    worker = getattr(config, "workerinput", None)
    begin = int(worker["workerid"].removeprefix("gw")) * len(nodes) // worker["workercount"] if worker else 0
    return nodes[begin:] + nodes[:begin]


@cache
def shares(path: Path) -> bool:
    """Return True if the tests of a file share a fixture with a wider scope than a test."""
    text = path.read_text()
    sources = [text]
    for directory in path.parents:
        conftest = directory / "conftest.py"
        sources += [conftest.read_text()] if conftest.exists() else []
        if directory == _TESTS:
            break
    return any(_takes(text, name) for name in _shared(sources))


def _shared(sources: list[str]) -> set[str]:
    """Return the shared fixtures, and those that depend on them."""
    fixtures = [found for source in sources for found in _FIXTURE.findall(source)]
    names = {name for options, name, _ in fixtures if _WIDE.search(options)}
    while more := {name for _, name, given in fixtures if any(_named(each, given) for each in names)} - names:
        names |= more
    return names


def _takes(text: str, name: str) -> bool:
    return bool(re.search(rf"\bdef test_\w+\([^)]*\b{name}:|usefixtures\([^)]*\"{name}\"", text))


def _named(name: str, given: str) -> bool:
    return bool(re.search(rf"\b{name}:", given))
