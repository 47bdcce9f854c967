"""Finding a Java that Spark runs on."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from wald.errors import NotFound

OLDEST = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')


@dataclass(frozen=True, slots=True)
class Java:
    """An installed Java; ``home`` is what JAVA_HOME has to be."""

    home: Path
    version: int


@cache
def find_java() -> Java | None:
    """The first Java new enough: that of JAVA_HOME, the one on the PATH, then those of the distribution."""
    for home in _homes():
        version = _version(home / "bin" / "java")
        if version is not None and version >= OLDEST:
            return Java(home, version)
    return None


def require_java() -> Java:
    """As :func:`find_java`.

    Raises:
        NotFound: there is none.
    """
    java = find_java()
    if java is None:
        raise NotFound(
            f"Spark needs Java {OLDEST} or newer, and there is none in JAVA_HOME, on the PATH or in /usr/lib/jvm",
            hint="apt install default-jre-headless; or set JAVA_HOME",
        )
    return java


def _homes() -> Iterator[Path]:
    if home := os.environ.get("JAVA_HOME"):
        yield Path(home)
    if program := shutil.which("java"):
        yield Path(program).resolve().parents[1]
    yield from sorted(Path("/usr/lib/jvm").glob("*"), reverse=True)


def _version(program: Path) -> int | None:
    try:
        told = subprocess.run([program, "-version"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    found = _VERSION.search(told.stderr)
    return int(found[1]) if found else None
