"""Commands of docs/systemd.md, typed unchanged on a machine with the units installed."""

from __future__ import annotations

import pytest
import units
from machine import Machine
from pages import blocks
from typed import type_blocks

PAGE = "docs/systemd.md"


@pytest.mark.slow
def test_the_page_can_be_typed(machine: Machine) -> None:
    units.install(machine)
    type_blocks(blocks(PAGE), shell=lambda script: machine.run("bash", "-c", script).stdout)
