"""The documented names of ``import wald``, each loaded on first use, and tracebacks of its errors."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from running import Daemon

import wald
from wald.errors import NotFound, NotPermitted, WaldError


def test_every_name_is_there() -> None:
    for name in wald.__all__:
        assert getattr(wald, name) is not None
        assert name in dir(wald)
    assert {"Batch", "Consumer", "Cursor", "Log", "Producer", "Record", "errors", "open"} <= set(wald.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'Customer'"):
        wald.Customer  # type: ignore[attr-defined]  # noqa: B018


def test_the_import_alone_loads_nothing() -> None:
    script = "import sys, wald; print(*[name for name in sys.modules if name.startswith('wald')])"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert loaded.stdout.split() == ["wald"]


def test_a_star_import_gives_the_documented_names() -> None:
    script = "from wald import *; Producer, Consumer, Log, Batch, Record, Cursor, errors"
    subprocess.run([sys.executable, "-c", script], check=True)


def test_a_traceback_ends_with_the_hint(daemon: Daemon) -> None:
    program = f"import wald; wald.Consumer({str(daemon.root)!r}, 'nosuch')"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr

    message, hint = shown.splitlines()[-2:]
    assert message.startswith("wald.errors.NotFound: ")
    assert "there is no route 'nosuch'" in message
    assert hint.startswith(f"  hint: to list all routes: wald --root {daemon.root} route list")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        (NotFound("gone"), ""),
        (NotFound("gone", hint="wald --help"), "wald --help"),
        (NotFound("gone", case="no-log", root=Path("/log")), "to create a log: wald --root /log run"),
    ],
    ids=["no hint", "hint", "case"],
)
def test_a_copy_from_another_process_shows_the_hint_once(error: WaldError, hint: str) -> None:
    copy: WaldError = pickle.loads(pickle.dumps(error))

    assert (copy.hint, copy.case, copy.facts) == (hint, error.case, error.facts)
    lines = traceback.format_exception_only(copy)
    assert lines == ["wald.errors.NotFound: gone\n", *([f"  hint: {hint}\n"] if hint else [])]


def test_a_note_is_added_below_the_hint() -> None:
    error = NotFound("gone", case="no-log", root="/log")
    error.add_note("after 3 steps")

    assert traceback.format_exception_only(error)[1:] == [
        "  hint: to create a log: wald --root /log run\n",
        "after 3 steps\n",
    ]


def test_a_denied_file_that_is_gone_since_then_has_a_hint(tmp_path: Path) -> None:
    assert NotPermitted("no", case="permission-denied", path=tmp_path / "gone").hint == f"ls -ld {tmp_path}/gone"
