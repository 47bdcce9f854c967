"""The header ``wald.not-before``: no value of it may stop a work group."""

from __future__ import annotations

import json

import pytest

from wald.format.records import NOT_BEFORE, not_before, with_not_before

LIMIT = 1 << 63


@pytest.mark.parametrize("due_ns", [1, -1, 1_700_000_000_000_000_000, LIMIT - 1, -LIMIT])
def test_a_time_comes_back(due_ns: int) -> None:
    assert not_before(json.dumps(with_not_before({"h": "ü"}, due_ns)).encode()) == due_ns


def test_other_headers_are_kept_and_an_earlier_time_is_not() -> None:
    assert with_not_before({"h": "1", NOT_BEFORE: "1"}, 2) == {"h": "1", NOT_BEFORE: "2"}


def test_headers_without_such_a_time_delay_nothing() -> None:
    for headers in [
        None,
        b"",
        b"{}",
        b'{"h": "wald.not-before"}',
        b'{"wald.not-before": "soon"}',
        b'{"wald.not-before": ""}',
        b'{"wald.not-before": null}',
        b'{"wald.not-before": ["1"]}',
        b'{"wald.not-before": 1e999}',
        b'{"wald.not-before": "%d"}' % LIMIT,
        b'{"wald.not-before": "%d"}' % (-LIMIT - 1),
        b'{"wald.not-before": "%s"}' % (b"9" * 5000),
        b'["wald.not-before"]',
        b'"wald.not-before"',
        b'{"wald.not-before": "\xff"}',
        b'{"wald.not-before": ' + b"[" * 100_000,
    ]:
        assert not_before(headers) == 0
