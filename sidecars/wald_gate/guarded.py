"""Reads the files that decide who a client is and what it may: none that other users may write.

This imports nothing that the extra ``gate`` brings.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from wald.errors import InvalidInput

_OTHERS_MAY_WRITE = stat.S_IWGRP | stat.S_IWOTH


def read_guarded(path: Path) -> bytes:
    """What a file has.

    Raises:
        InvalidInput: its group or all users may write it.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & _OTHERS_MAY_WRITE:
            who = "every user" if mode & stat.S_IWOTH else "its group"
            raise InvalidInput(f"{path}: {who} may write it (mode {mode:04o})", hint=f"chmod go-w {path}")
        return file.read()
