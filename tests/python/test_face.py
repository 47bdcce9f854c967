"""The documented names of ``import wald``, each loaded on first use, and tracebacks of its errors."""

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from running import Daemon

import wald
from wald.errors import NotFound, NotPermitted, WaldError


def test_every_name_is_there_and_the_import_alone_loads_nothing() -> None:
    for name in wald.__all__:
        assert getattr(wald, name) is not None
        assert name in dir(wald)
    assert {"Batch", "Consumer", "Cursor", "Log", "Producer", "Record", "errors", "open"} <= set(wald.__all__)
    with pytest.raises(AttributeError, match="'Customer'"):
        wald.Customer  # type: ignore[attr-defined]  # noqa: B018
    script = "import sys, wald; print(*[name for name in sys.modules if name.startswith('wald')]); from wald import *"
    loaded = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert loaded.stdout.split() == ["wald"]


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
def test_a_copy_from_another_process_shows_the_hint_once_and_notes_below_it(error: WaldError, hint: str) -> None:
    copy: WaldError = pickle.loads(pickle.dumps(error))
    copy.add_note("after 3 steps")

    assert (copy.hint, copy.case, copy.facts) == (hint, error.case, error.facts)
    lines = traceback.format_exception_only(copy)
    assert lines == ["wald.errors.NotFound: gone\n", *([f"  hint: {hint}\n"] if hint else []), "after 3 steps\n"]


def test_a_denied_file_that_is_gone_since_then_has_a_hint(tmp_path: Path) -> None:
    assert NotPermitted("no", case="permission-denied", path=tmp_path / "gone").hint == f"ls -ld {tmp_path}/gone"
