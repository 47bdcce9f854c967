"""Effective settings: options override the file, which overrides the defaults; 0 means unlimited in both."""

from __future__ import annotations

from pathlib import Path

import pytest

from wald.errors import InvalidInput
from wald_reclaim.policy import Limits
from wald_reclaim.settings import load_settings

UPPER = ("max_age", "max_bytes", "max_records")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "wald.toml"


@pytest.mark.parametrize("limit", UPPER)
def test_0_lifts_a_limit_of_the_log_as_option_and_in_the_file(file: Path, limit: str) -> None:
    file.write_text(f'[retention]\nlog_{limit} = 0\nunread = "expire"\n')
    as_option = load_settings(None, {limit: 0}).limits
    assert as_option == Limits()
    assert load_settings(file, {}).limits.max_bytes is None

    file.write_text("[retention]\nlog_max_age = 7\nlog_max_bytes = 7\nlog_max_records = 7\n")
    set_in_file = load_settings(file, {}).limits
    lifted = load_settings(file, {limit: 0}).limits
    names = {"max_age": "max_age_ns"}
    assert [getattr(set_in_file, names.get(each, each)) is None for each in UPPER] == [False] * 3
    assert [each for each in UPPER if getattr(lifted, names.get(each, each)) is None] == [limit]


def test_without_a_limit_nothing_can_expire() -> None:
    with pytest.raises(InvalidInput, match="needs a limit"):
        load_settings(None, {"max_bytes": 0, "unread": "expire"})


def test_the_option_keep_spares_what_is_unread_whatever_the_file_says(file: Path) -> None:
    """``expire`` is only a default: a route with keep loses nothing."""
    file.write_text(
        '[retention]\nlog_max_records = 5\nunread = "expire"\n'
        '[routes.a]\nunread = "expire"\nmax_records = 1\n'
        '[routes.b]\npinned_max_bytes = 9\non_pinned = "expire"\n'
        '[routes.c]\nunread = "keep"\n'
    )

    def losing(**options: str) -> list[str]:
        limits = load_settings(file, options).limits
        return [route for route in ("a", "b", "c", "other") if limits.may_lose(route)]

    assert losing() == losing(unread="expire") == ["a", "b", "other"]
    assert losing(unread="keep") == []
    assert load_settings(file, {"unread": "keep"}).limits.of("a").max_records == 1
