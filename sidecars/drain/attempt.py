"""One run of the command: records in on its stdin, its exit code out."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from wald.errors import InvalidInput

_NOT_A_PROGRAM = (errno.ENOENT, errno.EACCES, errno.ENOEXEC)


def check_command(command: Sequence[str]) -> None:
    """
    Raises:
        InvalidInput: there is no such program.
    """
    if shutil.which(command[0]) is None:
        raise _not_a_program(command, os.strerror(errno.ENOENT))


def attempt(command: Sequence[str], stdin: bytes, variables: Mapping[str, str]) -> int:
    """Run ``command`` to its end; returns its exit code, or the signal that ended it as a number below 0.

    It may leave off reading whenever it likes. It has a session of its own, so that Ctrl-C, which the terminal sends to
    everything in its foreground, ends drain after this run and not in the midst of it.

    Args:
        variables: what its environment has beside our own.

    Raises:
        InvalidInput: it cannot be run at all.
    """
    try:
        done = subprocess.run(command, input=stdin, env=os.environ | variables, start_new_session=True, check=False)
    except OSError as error:
        if error.errno not in _NOT_A_PROGRAM:
            raise
        raise _not_a_program(command, os.strerror(error.errno)) from error
    return done.returncode


def _not_a_program(command: Sequence[str], words: str) -> InvalidInput:
    return InvalidInput(
        f"{command[0]}: cannot be run: {words}",
        hint=f"command -v {command[0]}; a script needs a first line like #!/bin/sh",
    )
