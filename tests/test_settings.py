"""Settings: their sources, their values, and the messages about wrong ones."""

import contextlib
import os
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from wald.errors import InvalidInput
from wald.setting_types import GIB, KIB, MIB, duration, size
from wald.settings import Config, Retention, RouteConfig, RouteLimits, load, parse_setting, reference, setting_types


def from_text(tmp_path: Path, text: str) -> Config:
    path = tmp_path / "wald.toml"
    path.write_text(text)
    return load(path, {})


def refusal(tmp_path: Path, text: str) -> InvalidInput:
    with pytest.raises(InvalidInput) as caught:
        from_text(tmp_path, text)
    assert "\n" not in caught.value.message
    assert caught.value.hint
    return caught.value


def test_without_anything_the_defaults_hold() -> None:
    config = load(None, {})

    assert config == Config()
    assert (config.segment_max_bytes, config.segment_max_age, config.sync) == (64 * MIB, 3600.0, "commit")


def test_a_file_is_read_and_a_variable_goes_before_it(tmp_path: Path) -> None:
    text = 'segment_max_bytes = "1MiB"\nsync_interval = 0.5\nsocket_mode = 0o600\nmetrics = "127.0.0.1:9464"\n'
    config = from_text(tmp_path, f"\ufeff{text}sync = 'never'\n")  # an editor may put a mark in front

    assert (config.segment_max_bytes, config.sync_interval, config.socket_mode) == (MIB, 0.5, 0o600)
    assert (config.metrics, config.sync) == ("127.0.0.1:9464", "never")
    config = load(tmp_path / "wald.toml", {"WALD_SYNC": "interval"})
    assert (config.segment_max_bytes, config.sync) == (MIB, "interval")


def test_routes_have_tables(tmp_path: Path) -> None:
    table = f'[routes.access]\nfifo = true\nmode = "0600"\nwriters = ["root", {os.getuid()}, 7]\n[routes.plain]\n'
    config = from_text(tmp_path, table)

    assert config.routes["access"] == RouteConfig(fifo=True, mode=0o600, writers=frozenset({0, os.getuid(), 7}))
    assert config.routes["plain"] == RouteConfig()


def test_a_route_has_the_limits_of_retention_unless_it_sets_its_own(tmp_path: Path) -> None:
    config = from_text(
        tmp_path,
        '[retention]\nmin_age = "1h"\nmax_age = "7d"\nmax_bytes = "1GiB"\nunread = "expire"\n'
        '[routes.own]\nmax_age = "1d"\nmax_bytes = 0\nunread = "keep"\npinned_max_bytes = "1MiB"\n'
        'on_pinned = "reject"\n',
    )
    default = RouteLimits(max_age=7 * 86400.0, max_bytes=GIB, unread="expire", on_pinned="block")
    own = RouteLimits(max_age=86400.0, unread="keep", pinned_max_bytes=MIB, on_pinned="reject")

    assert config.retention.min_age == 3600.0
    assert config.limits("own") == own
    assert config.limits("without a table") == default


def test_without_limits_a_route_keeps_everything() -> None:
    assert Config().limits("any") == RouteLimits(unread="keep", on_pinned="block")


@pytest.mark.parametrize(
    ("text", "line", "message", "hint"),
    [
        ("segment_max_byte = 1", 1, "there is no setting 'segment_max_byte'", "segment_max_bytes"),
        ("\n\nsnyc = 'commit'", 3, "there is no setting 'snyc'", "sync"),
        ("[routes.a]\nfifo = true\nmod = 1", 3, "there is no setting 'mod' in [routes.a]", "mode"),
        ("[routes.a]\nfifo = true\nsync = 'never'", 3, "'sync' is inside [routes.a]", "above the first table"),
        ("[routes.a]\ngrace = 1", 2, "'grace' is inside [routes.a]", "move grace to [retention]"),
        ("max_age = 1", 1, "'max_age' is above all tables", "[retention]"),
        ("[retention]\nsync = 'never'", 2, "'sync' is inside [retention]", "above the first table"),
        ("[retention]\nmax_byte = 3", 2, "there is no setting 'max_byte' in [retention]", "max_bytes"),
        ("[retention]\nunread = 'lose'", 2, 'retention.unread must be "keep" or "expire"', "--help"),
        ("[retention]\nrequire_archived = 1", 2, "retention.require_archived must be true or false", "--help"),
        ("[routes.a]\nmax_records = -1", 2, "routes.a.max_records must be 0 to", "--help"),
        ("retention = 3", 1, "retention must be a table", "[retention]"),
        ("[routes.a]\nfifo = true\nroutes.b = {}", 3, "'routes' is inside [routes.a]", "to tables [routes.NAME]"),
        ("zzz = 1", 1, "there is no setting 'zzz'", "wald run --help"),
        ("[routes.a]\nfifo = true\n[routes.b]\nfifo = 1", 4, "routes.b.fifo must be true or false, not 1", "--help"),
        ("[routes.a]\nmode = 620", 2, "routes.a.mode must be permission bits", "--help"),
        ("[routes.a]\nwriters = 3", 2, "routes.a.writers must be a list of existing users", "names or numbers"),
        ("[routes.a]\nwriters = ['no such user']", 2, "no such user", "getent"),
        ("[routes.'../x']\nfifo = true", 1, "illegal route name '../x'", "letters"),
        ('[routes."a\\u0000b"]', None, "illegal route name 'a\\x00b'", "letters"),
        ("routes = 3", 1, "routes must be tables", "[routes.NAME]"),
        ("[routes]\na = 3", 2, "routes.a must be a table", "[routes.a]"),
        ("sync = 'sometimes'", 1, 'sync must be "commit", "interval" or "never"', "--help"),
        ("segment_max_bytes = 1000", 1, '"64KiB" to "64GiB", not 1000', "--help"),
        ("segment_max_bytes = true", 1, "a size such as", "--help"),
        ("segment_max_bytes = -1", 1, "a size such as", "--help"),
        ("frame_timeout = 'soon'", 1, "a duration such as", "--help"),
        ("frame_timeout = 0", 1, '"100ms" to "1d"', "--help"),
        ("connections_max = 0", 1, "1 to 65536, not 0", "--help"),
        ("connections_max = 2.5", 1, "a whole number, not 2.5", "--help"),
        ("segment_age_jitter = 1.0", 1, "0 to 0.9, not 1.0", "--help"),
        ("metrics = '9464'", 1, "an address such as", "--help"),
        ("compression_level = 'best'", 1, "a whole number", "--help"),
        (
            "[routes.a]\n[routes.b]\n[routes.a]",
            None,
            "not TOML: Cannot declare",
            "a table or a setting may occur only once",
        ),
        ("sync = 'never'\nsync = 'commit'", None, "not TOML: Cannot overwrite", "may occur only once"),
        ("sync == 'commit'", None, "not TOML", "edit"),
    ],
)
def test_a_wrong_setting_is_reported_with_file_and_line(
    tmp_path: Path, text: str, line: int | None, message: str, hint: str
) -> None:
    """Every message names the file, the line if known, the problem and the fix."""
    error = refusal(tmp_path, text)

    assert error.message.startswith(f"{tmp_path / 'wald.toml'}{f':{line}' if line else ''}: ")
    assert message in error.message
    assert hint in error.hint


def test_a_file_that_cannot_be_read_or_is_not_text_is_reported(tmp_path: Path) -> None:
    for path in (tmp_path / "absent.toml", tmp_path):
        with pytest.raises(InvalidInput, match=str(path)):
            load(path, {})
    (tmp_path / "wald.toml").write_bytes(b"# ok\n\xff\n")
    with pytest.raises(InvalidInput, match="offset 5"):
        load(tmp_path / "wald.toml", {})


def test_misspelt_variable_is_reported_and_those_of_others_are_not() -> None:
    """Kubernetes sets WALD_PORT and others for a service called wald; WALD_ROOT belongs to the command line."""
    others = {"WALD_PORT": "tcp://10.0.0.1:80", "WALD_SERVICE_HOST": "10.0.0.1", "WALD_ROOT": "/x", "PATH": "/bin"}

    assert load(None, others) == Config()
    with pytest.raises(InvalidInput) as caught:
        load(None, {"WALD_SEGMENT_MAX_BYTE": "1MiB"})
    assert caught.value.message.startswith("WALD_SEGMENT_MAX_BYTE: ")
    assert "segment_max_bytes" in caught.value.hint
    with pytest.raises(InvalidInput, match=r"^WALD_SYNC: sync must be"):
        load(None, {"WALD_SYNC": "x"})


def test_defaults_are_what_the_reference_says(tmp_path: Path) -> None:
    """The table of settings, written out as a file, is the default configuration."""
    rows = [setting for setting in reference() if setting.default]
    text = "\n".join(f"{setting.name} = {setting.default}" for setting in rows)

    assert from_text(tmp_path, text) == Config()
    assert {setting.name for setting in reference()} == {each.name for each in fields(Config) if each.compare}
    assert all(setting.meaning and setting.bounds for setting in reference())


def test_defaults_of_retention_are_what_the_reference_says(tmp_path: Path) -> None:
    rows = reference(Retention) + reference(RouteLimits)
    lines = "\n".join(f"{setting.name} = {setting.default}" for setting in rows)
    written = from_text(tmp_path, f"[retention]\n{lines}\n[routes.a]\n")

    assert replace(written.retention, **asdict(RouteLimits())) == Retention()
    assert written.limits("a") == Config().limits("a")
    assert {setting.name for setting in rows} == {each.name for each in fields(Retention)}


def test_what_a_reload_may_change_is_a_setting() -> None:
    assert {setting.name for setting in reference() if setting.reloadable} == Config.reloadable


@given(st.integers(0, 1 << 62))
def test_a_size_that_is_shown_reads_the_same(number: int) -> None:
    kind = size(0, 1 << 62)

    assert kind.parse(kind.show(number).strip('"')) == number


@given(st.integers(0, 10**9))
def test_a_duration_that_is_shown_reads_the_same(milliseconds: int) -> None:
    kind = duration(0, 10**9)

    assert kind.parse(kind.show(milliseconds / 1000).strip('"')) == pytest.approx(milliseconds / 1000, rel=1e-5)


def test_sizes_are_read_as_people_write_them() -> None:
    written = {"0": 0, "1": 1, "64KiB": 64 * KIB, "64 KiB": 64 * KIB, "2GiB": 2 * GIB, "1kB": 1000, "3MB": 3_000_000}
    assert {text: size(0, GIB * 2).parse(text) for text in written} == written


@given(st.one_of(st.text(), st.integers(), st.floats(), st.booleans(), st.none(), st.lists(st.integers())))
def test_no_value_breaks_a_kind(value: object) -> None:
    """The parser returns a checked value or raises InvalidInput."""
    for name, kind in (setting_types(Config) | setting_types(RouteConfig)).items():
        with contextlib.suppress(InvalidInput):
            parse_setting(name, value, kind, "here", help_command="wald run --help")
