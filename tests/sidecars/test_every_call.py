"""After a fault at any system call of a program, running the command again gives the result of an undisturbed run."""

import random
from pathlib import Path

import pytest
from every_call import Disturbed, some_of
from every_program import PROGRAMS

FAULTS = 2  # per program; `make torture TORTURE='--mode faults'` tries more


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_faults_are_made_up_for_by_the_same_command(name: str, tmp_path: Path) -> None:
    disturbed = Disturbed(PROGRAMS[name], tmp_path)
    for fault in some_of(disturbed.faults, 10 * FAULTS, random.Random(name)):
        assert disturbed.wrong_after(fault) == [], str(fault)
        if disturbed.hits == FAULTS:
            return
    pytest.fail(f"{disturbed.hits} of {FAULTS} faults hit the log")
