"""Rows of the table that ``scripts/torture --mode full-disk`` walks: no disk is too small, and no reserve too large."""

from __future__ import annotations

import pytest
from filling import Row, walk

from wald.setting_types import MIB


@pytest.mark.slow
@pytest.mark.parametrize(
    "row",
    [
        Row(16 * MIB, 64 * MIB, 8 * MIB, random=True),
        Row(24 * MIB, 4 * MIB, 256 * MIB, random=False),
        Row(32 * MIB, 4 * MIB, 24 * MIB, random=True),
        Row(64 * MIB, 16 * MIB, 8 * MIB, random=True),
    ],
    ids=str,
)
def test_a_full_disk_that_was_read_and_reclaimed_takes_input_again(row: Row) -> None:
    """After a kill, and again; no acknowledged record is lost, and the effective reserve stays free."""
    assert walk(row) == []
