"""Help of the programs, and what a former command answers."""

from __future__ import annotations

import pytest
from running import refusal_of


@pytest.mark.parametrize(
    ("removed", "instead"),
    [
        ("routes", "wald route list"),
        ("latency", "wald status --latency"),
        ("grep", "wald read --grep PATTERN --prefix"),
        ("dump", "wald inspect --content FILE"),
        ("file", "wald inspect FILE"),
    ],
)
def test_a_removed_command_names_its_successor(removed: str, instead: str) -> None:
    code, message, hint = refusal_of(removed, "a")

    assert (code, hint) == (2, instead)
    assert f"{removed} was removed" in message
