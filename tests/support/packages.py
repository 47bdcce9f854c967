"""The Debian package of this checkout, and the same under a higher revision."""

import os
import re
import subprocess
import sys
from pathlib import Path

import programs

_BUILDER = [sys.executable, str(Path(__file__).parents[2] / "scripts/make-deb")]
_ENVIRONMENT = os.environ | {"SOURCE_DATE_EPOCH": "1700000000"}


def build(directory: Path, *, umask: int = 0o022) -> Path:
    """Build it in an empty directory."""
    programs.program("dpkg-deb")
    programs.program("strip")
    subprocess.run([*_BUILDER, str(directory)], env=_ENVIRONMENT, umask=umask, check=True)
    (built,) = directory.iterdir()
    return built


def newer(package: Path, directory: Path, *, revision: int = 2) -> Path:
    """Return the same package under a higher revision: apt does not upgrade to the installed revision."""
    tree, built = directory / "tree", directory / "newer.deb"
    subprocess.run(["dpkg-deb", "--raw-extract", package, tree], check=True)
    control = tree / "DEBIAN/control"
    control.write_text(re.sub(r"^(Version: .*)-1$", rf"\1-{revision}", control.read_text(), flags=re.MULTILINE))
    subprocess.run(["dpkg-deb", "--root-owner-group", "-Znone", "--build", tree, built], check=True)
    return built
