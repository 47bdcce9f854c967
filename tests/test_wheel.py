"""The wheel, installed alone, contains everything that a user needs."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
from collections.abc import Iterable
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROGRAMS: list[str] = sorted(PROJECT["project"]["scripts"])
PACKAGES = [ROOT / package for package in PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]]
EXTRAS: list[str] = sorted(PROJECT["project"]["optional-dependencies"])
# Tests that import public modules and start programs of each package. The others (cli, daemon, store, spark) take
# many minutes and find no further gaps; the tests of docs, deploy and the sources do not use the wheel.
SUBJECTS = ("producer", "python", "sidecars/drain")

pytestmark = pytest.mark.slow  # `make test-wheel` runs this file


def run(*words: object, cwd: Path, stdin: str = "") -> str:
    """Run a program that finds only its environment's packages; return its output."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "WALD"))}
    command = [*map(str, words)]
    done = subprocess.run(command, cwd=cwd, env=env, input=stdin, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def required(requirements: list[str], extras: Iterable[str]) -> set[str]:
    """Return the names of the packages that satisfy ``requirements``, including indirect dependencies."""
    names: set[str] = set()
    asked = ["", *extras]
    for requirement in map(Requirement, requirements):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in asked):
            inner = distribution(requirement.name).requires or []
            names |= {requirement.name} | required(inner, requirement.extras)
    return names


def link(name: str, site: Path) -> None:
    """Link an installed package into another environment."""
    found = distribution(name)
    for part in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
        target = site / part
        if not target.exists():
            target.symlink_to(str(found.locate_file(part)))


def environment(directory: Path, wheel: Path, extras: Iterable[str]) -> Path:
    """Create an environment with the wheel and its requirements; return the directory of its programs."""
    venv.create(directory, symlinks=True)
    programs = directory / "bin"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", programs / "python"]
    run(*pip, "install", "--no-index", "--no-deps", wheel, cwd=directory)
    (site,) = directory.glob("lib/python3*/site-packages")
    (metadata,) = site.glob("wald-*.dist-info/METADATA")
    for name in required(re.findall(r"^Requires-Dist: (.*)$", metadata.read_text(), re.MULTILINE), extras):
        link(name, site)
    run(*pip, "check", cwd=directory)
    return programs


def built(kind: str, source: Path, directory: Path) -> Path:
    """Build a distribution of ``source``, a checkout or an unpacked sdist."""
    run(sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", directory, cwd=source)
    (file,) = directory.iterdir()
    return file


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("wheel", ROOT, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sdist, unpacked."""
    directory = tmp_path_factory.mktemp("source")
    with tarfile.open(built("sdist", ROOT, tmp_path_factory.mktemp("sdist"))) as archive:
        archive.extractall(directory, filter="data")
    (top,) = directory.iterdir()
    return top


@pytest.fixture(scope="module")
def plain(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment without any extra."""
    return environment(tmp_path_factory.mktemp("plain"), wheel, ())


@pytest.fixture(scope="module")
def full(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of an environment with every extra."""
    return environment(tmp_path_factory.mktemp("full"), wheel, EXTRAS)


def test_it_holds_the_packages_and_nothing_else(wheel: Path) -> None:
    names = ZipFile(wheel).namelist()
    files = {str(path.relative_to(package.parent)) for package in PACKAGES for path in package.rglob("*.py")}

    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {each.name for each in PACKAGES}
    assert {name for name in names if name.endswith(".py")} == files
    assert [name for name in names if re.search(r"(^|/)(test_|tests/|conftest)", name)] == []
    assert "wald/py.typed" in names


def test_it_says_its_version(plain: Path, tmp_path: Path) -> None:
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "wald/__init__.py").read_text(), re.MULTILINE)

    assert version is not None
    assert version[1] in run(plain / "wald", "--version", cwd=tmp_path)


@pytest.mark.parametrize("program", PROGRAMS)
def test_every_program_answers_without_an_extra(plain: Path, tmp_path: Path, program: str) -> None:
    assert run(plain / program, "--help", cwd=tmp_path).startswith("Usage: ")


def test_a_log_is_written_and_read_without_an_extra(plain: Path, tmp_path: Path) -> None:
    root = tmp_path / "log"
    run(plain / "wald", "run", "--root", root, "--stdin", "access", cwd=tmp_path, stdin="one\ntwo\n")

    assert run(plain / "wald", "read", "--root", root, "access", cwd=tmp_path) == "one\ntwo\n"
    run(plain / "wald-reclaim", "--root", root, "--min-age", "1h", cwd=tmp_path)


@pytest.mark.parametrize("package", [each.name for each in PACKAGES])
def test_every_package_comes_from_the_wheel(full: Path, tmp_path: Path, package: str) -> None:
    file = Path(run(full / "python", "-c", f"import {package}; print({package}.__file__)", cwd=tmp_path).strip())

    assert file.is_relative_to(full.parent)


def test_a_type_checker_sees_its_types(plain: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import wald\n\nreveal_type(wald.open)\n")
    mypy = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--python-executable"]
    programs = [ROOT / "examples" / name for name in ("produce.py", "consume.py", "log.py", "pipeline.py")]

    assert "wald.log.Log" in run(*mypy, plain / "python", "program.py", cwd=tmp_path)
    run(*mypy, plain / "python", "--config-file=", "--disallow-any-expr", *programs, cwd=tmp_path)


def test_the_sdist_holds_what_the_repository_holds(source: Path) -> None:
    tracked = set(run("git", "ls-files", cwd=ROOT).splitlines())

    assert {str(path.relative_to(source)) for path in source.rglob("*") if path.is_file()} == tracked | {"PKG-INFO"}


def test_the_sdist_builds_the_same_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    assert built("wheel", source, tmp_path).read_bytes() == wheel.read_bytes()


def test_the_sdist_passes_the_tests_of_its_sources(source: Path) -> None:
    run(sys.executable, "-m", "pytest", "-q", "tests/test_layers.py", "tests/test_tidy.py", cwd=source)


def test_the_tests_of_the_sdist_pass_with_the_wheel(source: Path, wheel: Path, tmp_path: Path) -> None:
    """The test directory is the sdist without its packages, so that only the wheel can be imported."""
    programs = environment(tmp_path / "environment", wheel, EXTRAS)
    (site,) = (tmp_path / "environment").glob("lib/python3*/site-packages")
    for name in required(PROJECT["dependency-groups"]["dev"], ()):
        link(name, site)
    (programs / "bagit.py").symlink_to(Path(sys.executable).with_name("bagit.py"))  # tests call it by this path
    shutil.copytree(source, tmp_path / "tests")
    for package in PACKAGES:
        shutil.rmtree(tmp_path / "tests" / package.relative_to(ROOT))
    tests = [f"tests/{subject}" for subject in SUBJECTS]
    options = ["-q", "-n", str(2 * (os.cpu_count() or 1)), "--maxprocesses", "8", "--dist", "loadscope"]

    run(programs / "python", "-m", "pytest", *options, "-m", "not slow and not spark", *tests, cwd=tmp_path / "tests")
