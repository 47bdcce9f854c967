"""Commands of docs/systemd.md, typed unchanged on a machine with the units installed."""

from __future__ import annotations

import re

import pytest
import units
from machine import Machine
from pages import PAGES, blocks
from typed import type_blocks

PAGE = "docs/systemd.md"


@pytest.mark.slow
def test_the_page_can_be_typed(machine: Machine) -> None:
    units.install(machine)
    type_blocks(blocks(PAGE), shell=lambda script: machine.run("bash", "-c", script).stdout)


def test_every_unit_is_on_the_page() -> None:
    named = {name for row in re.findall(r"^\| (`wald.*?) \|", PAGES[PAGE], re.MULTILINE) for name in row.split("`")}
    named = {re.sub("@[A-Z]+", "@", name) for name in named}
    shipped = {path.name for path in units.UNITS.iterdir() if path.suffix in (".service", ".socket")}
    assert shipped <= named
