"""Troubles while ``wald-reclaim`` watches: each outage is reported once, and the next one again."""

from __future__ import annotations

import pytest

from wald_reclaim.report import Report


@pytest.mark.parametrize(
    ("passes", "warned"),
    [
        (["disk", "disk", "disk"], ["disk"]),
        (["disk", "", "disk"], ["disk", "disk"]),
        (["disk", "cursor", "disk"], ["disk", "cursor", "disk"]),
    ],
    ids=["one that lasts", "two of the same", "another in between"],
)
def test_an_outage_is_reported_once(passes: list[str], warned: list[str]) -> None:
    said: list[str] = []
    report = Report(as_json=False, intended=False, watching=True, write=lambda _: None, warn=said.append)
    for trouble in passes:
        report.begin()
        for _ in range(2 if trouble else 0):
            report.trouble(trouble)
    assert said == warned
