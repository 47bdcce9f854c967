"""Programs of the system that a test is about or that judge our files: found, or the test is skipped.

In CI nothing is skipped for want of one: .ci/run installs them.
"""

from __future__ import annotations

import os
import shutil

import pytest


def program(name: str, *, package: str) -> str:
    """The path of a program.

    Args:
        package: Debian's package that has it.
    """
    found = shutil.which(name)
    if found is None:
        lack(f"{name}: apt-get install {package}")
    return str(found)


def lack(reason: str) -> None:
    """Skip the test that runs for want of something; in CI, fail it."""
    if os.environ.get("CI"):
        pytest.fail(f"CI must have it: {reason}")
    pytest.skip(f"needs {reason}")
