"""A fault at any system call of a program: the same command again does the rest, as if there had been no fault."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from every_call import Disturbed, some_of
from every_program import PROGRAMS

SOME = ("reclaim shrinks", "repair", "archive", "group skip")


@pytest.mark.parametrize("name", SOME)
def test_a_fault_is_made_up_for_by_the_same_command(name: str, tmp_path: Path) -> None:
    assert_made_up_for(name, tmp_path, faults=1)


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_faults_are_made_up_for_by_the_same_command(name: str, tmp_path: Path) -> None:
    assert_made_up_for(name, tmp_path, faults=2)


def assert_made_up_for(name: str, base: Path, *, faults: int) -> None:
    disturbed = Disturbed(PROGRAMS[name], base)
    for fault in some_of(disturbed.faults, 10 * faults, random.Random(name)):
        assert disturbed.wrong_after(fault) == [], str(fault)
        if disturbed.hits == faults:
            return
    pytest.fail(f"{disturbed.hits} of {faults} faults hit the log")
