"""Machines on which units, packages and runbooks are tried."""

from collections.abc import Iterator
from pathlib import Path

import machine as machines
import packages
import programs
import pytest


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[machines.Machine]:
    """One that the tests of a module share."""
    if reason := machines.lack():
        programs.lack(reason)
    machine = machines.Machine(tmp_path_factory.mktemp("machine"))
    yield machine
    machine.close()


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Debian package of this checkout."""
    return packages.build(tmp_path_factory.mktemp("package"))
