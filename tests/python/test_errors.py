"""What a program in Python shows of an error that it does not handle."""

from __future__ import annotations

import pickle
import subprocess
import sys
import traceback
from pathlib import Path

import pytest
from running import Daemon

from wald.errors import NotFound, WaldError


def test_a_traceback_ends_with_the_hint(daemon: Daemon) -> None:
    program = f"import wald; wald.Consumer({str(daemon.root)!r}, 'nosuch')"
    shown = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False).stderr

    message, hint = shown.splitlines()[-2:]
    assert message.startswith("wald.errors.NotFound: ")
    assert "there is no route 'nosuch'" in message
    assert hint.startswith(f"  hint: wald --root {daemon.root} routes")


@pytest.mark.parametrize("hint", ["", "wald --help"])
def test_a_copy_from_another_process_shows_the_hint_once(hint: str) -> None:
    copy: WaldError = pickle.loads(pickle.dumps(NotFound("gone", hint=hint)))

    lines = traceback.format_exception_only(copy)
    assert lines == ["wald.errors.NotFound: gone\n", *([f"  hint: {hint}\n"] if hint else [])]


def test_a_command_shows_the_hint_once(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "wald", "--root", tmp_path, "routes"], capture_output=True, text=True, check=False
    )

    assert done.stderr.count("hint:") == 1
