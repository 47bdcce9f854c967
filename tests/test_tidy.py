"""House rules that no linter checks, and promises to contributors."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path

import pytest
from pages import VAGUE

import wald

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for package in ("wald", "sidecars") for path in (ROOT / package).rglob("*.py"))
LIBRARIES = [path for path in SOURCES if "cli" not in path.relative_to(ROOT).parts and path.stem != "command"]
LAYERS = "client daemon format files segments retention reading writing checking repairing"
MAPPED = [ROOT / "wald" / layer for layer in LAYERS.split()]
PRINTING = re.compile(
    r"print|(rich\.)?print|click\.(echo|secho|progressbar)|sys\.std(out|err)\.(buffer\.)?(write|writelines)|sys\.exit|exit|quit"
)
# Modules that may write to stderr, but never to stdout.
STDERR_WRITERS = {
    ROOT / "wald/daemon/startup.py",  # the log of the daemon
    ROOT / "wald/logging.py",  # records that a handler could not send, as in the standard library
    ROOT / "sidecars/wald_spark/session.py",  # after the JVM's own output
}
STREAMS = re.compile(r"sys\.__?std(out|err)__|sys\.std(out|err)(?!\.fileno|\.isatty)")
# Only the disk may call these functions: tests replace it to make them fail.
DISK = ROOT / "wald/files/disk.py"
DURABLE = {"os.fsync", "os.fdatasync", "os.sync", "os.ftruncate", "os.truncate", "os.posix_fallocate", "os.pwritev"}
TESTS = sorted((ROOT / "tests").rglob("*.py"))
SCRIPTS = sorted(path for path in (ROOT / "scripts").rglob("*") if path.is_file() and path.suffix != ".pyc")
LOCK = ROOT / "requirements.lock"
SPARK_LOCK = ROOT / "requirements-spark-4.2.lock"
RUNTIME_LOCK = ROOT / "requirements-runtime.lock"
LOCKS = [LOCK, SPARK_LOCK, RUNTIME_LOCK]
DOCUMENTS = ("CHANGELOG.md", "CONTRIBUTING.md", "README.md", "SECURITY.md")
CONFIGURATIONS = (".ci/run", ".editorconfig", ".github/workflows/ci.yml", ".pre-commit-config.yaml")
PAGES = sorted(path for path in (ROOT / "docs").rglob("*") if path.suffix in (".md", ".py"))
OTHERS = PAGES + [ROOT / name for name in (*DOCUMENTS, *CONFIGURATIONS, "Makefile", "pyproject.toml")] + LOCKS
OPENING = re.compile(r'(?:#.*\n)*r?"""(.*?)"""', re.DOTALL)  # faster than parsing the file
# A path that exists on one machine only: a home, a work directory, or a scratch directory in code.
MACHINE_PATH = re.compile(r"""(?<![\w.])/(?:home|Users|work|root|opt|mnt)/\w""")
ADDRESS = re.compile(r"https?://[\w.-]*(?:pypi|pythonhosted|/simple)", re.IGNORECASE)


def breaking(paths: Iterable[Path], rule: Callable[[Path], object]) -> dict[str, object]:
    """Return the findings of ``rule`` by file."""
    return {str(path.relative_to(ROOT)): found for path in paths if (found := rule(path))}


@cache
def text(path: Path) -> str:
    return path.read_text(errors="replace")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


@cache
def calls(path: Path) -> set[str]:
    """Return the names of the functions that a file calls, as written."""
    found = [node.func for node in ast.walk(tree(path)) if isinstance(node, ast.Call)]
    return {ast.unparse(function) for function in found if isinstance(function, ast.Name | ast.Attribute)}


def passed(call: ast.Call) -> list[str]:
    """Return the arguments of a call, as written."""
    return [ast.unparse(value) for value in (*call.args, *(keyword.value for keyword in call.keywords))]


def test_the_rules_are_asked_of_every_file() -> None:
    """No list of files is empty."""
    assert len(SOURCES) > 100 < len(TESTS)
    assert min(map(len, (LIBRARIES, MAPPED, SCRIPTS, PAGES, LOCKS))) > 2
    assert all(path.exists() for path in (*STDERR_WRITERS, *LOCKS))


def test_modules_say_what_they_are_in_their_first_sentence() -> None:
    """Every module starts with a docstring whose first paragraph is a full sentence."""

    def says_nothing(path: Path) -> bool:
        docstring = OPENING.match(text(path))
        is_empty = text(path) == "" and path.name == "__init__.py"
        return not is_empty and (not docstring or docstring[1].split("\n\n")[0].rstrip()[-1:] not in (".", ":", "?"))

    assert breaking(SOURCES + TESTS, says_nothing) == {}


def test_only_commands_print_and_exit() -> None:
    """Libraries return values: only ``wald.cli`` and the module ``command`` of a sidecar print or exit."""

    def prints(path: Path) -> list[str]:
        nodes = [node for node in ast.walk(tree(path)) if isinstance(node, ast.Call)] if "sys." in text(path) else []
        arguments = [value for node in nodes for value in passed(node)]
        used = [*filter(PRINTING.fullmatch, calls(path)), *filter(STREAMS.match, arguments)]
        allowed = "sys.stderr" if path in STDERR_WRITERS else "nothing"
        return [use for use in used if not use.startswith(allowed)] + re.findall(r"os\.write\(1", text(path))

    named = [path for path in LIBRARIES if re.search(r"print|echo|progressbar|sys\.|exit|quit|os\.write", text(path))]
    assert breaking(named, prints) == {}


def test_only_the_disk_makes_bytes_durable() -> None:
    """A test that replaces the disk then sees every step at which a crash can happen."""
    named = [path for path in SOURCES if any(call.removeprefix("os.") in text(path) for call in DURABLE)]
    others = [path for path in named if path.is_relative_to(ROOT / "wald") and path != DISK]

    assert breaking(others, lambda path: DURABLE & calls(path)) == {}
    assert DURABLE & calls(DISK)


def test_layers_list_their_modules() -> None:
    """The docstring of each layer names all of its modules."""

    def unlisted(package: Path) -> set[str]:
        listed = set(re.findall(r"\w+", ast.get_docstring(tree(package / "__init__.py")) or ""))
        return {path.stem for path in package.glob("*.py") if path.stem != "__init__"} - listed

    assert breaking(MAPPED, unlisted) == {}


def test_no_file_names_a_machine() -> None:
    """No file contains a path of one machine or the address of a package index."""
    files = [path for path in SOURCES + TESTS + SCRIPTS + OTHERS if path.exists() and path != Path(__file__)]

    assert breaking(files, lambda path: MACHINE_PATH.findall(text(path)) + ADDRESS.findall(text(path))) == {}


def test_tests_wait_for_conditions() -> None:
    """A sleeping test is slow on a fast machine and wrong on a slow one; only ``running`` polls."""
    named = [path for path in TESTS if "sleep" in text(path)]  # parse a file only if it may break the rule

    assert list(breaking(named, lambda path: "time.sleep" in calls(path))) == ["tests/support/running.py"]


def test_the_language_is_plain() -> None:
    """Names, comments and messages are checked here; tests/docs applies the same word list to the documents."""
    assert breaking(SOURCES + SCRIPTS, lambda path: VAGUE.findall(text(path))) == {}


def test_locks_pin_every_package_by_hash() -> None:
    """The lock lists exactly the installed packages, without their sources."""
    for path in LOCKS:
        entries = [line for line in text(path).splitlines() if line and not line.startswith(" ")]

        assert entries, path
        assert [line for line in entries if not re.match(r"[a-z0-9-]+==[^ ]+ ", line)] == [], path
        assert len(entries) <= text(path).count("--hash=sha256:"), path
        assert "://" not in text(path), path
        assert not re.search(r"--(index|find|extra|trusted)", text(path)), path


def test_lock_holds_what_the_project_asks_for() -> None:
    """The lock pins every requirement of the package and of the dev group."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    optional = project["project"]["optional-dependencies"]
    wanted = project["project"]["dependencies"] + project["dependency-groups"]["dev"]
    wanted += optional["arrow"] + optional["spark"]
    pinned = set(re.findall(r"^([a-z0-9-]+)==", LOCK.read_text(), re.MULTILINE))

    assert set() == {re.split(r"[][<>=!~ ]", requirement)[0] for requirement in wanted} - pinned


def test_the_locks_differ_in_spark_only() -> None:
    """Failures with the older Spark must be caused by Spark."""
    newer, older = (
        dict(re.findall(r"^([a-z0-9-]+)==(\S+)", path.read_text(), re.MULTILINE)) for path in (LOCK, SPARK_LOCK)
    )

    assert newer["pyspark"].startswith("4.3.")
    assert older["pyspark"].startswith("4.2.")
    assert newer | {"pyspark": ""} == older | {"pyspark": ""}


def test_what_is_deployed_is_what_was_tested() -> None:
    """The lock of images and packages has the runtime requirements at the tested versions, and no tools."""
    everything, runtime = (
        {entry.split(" ")[0]: set(re.findall(r"sha256:\w+", entry)) for entry in re.split(r"\n(?=[a-z])", text)}
        for text in (LOCK.read_text(), RUNTIME_LOCK.read_text())
    )
    names = {pinned.split("==")[0] for pinned in runtime}

    assert runtime.items() <= everything.items()
    assert {"click", "rich", "s3fs", "zstandard"} <= names
    assert names & {"moto", "mypy", "pyspark", "pytest", "ruff"} == set()


def test_doctests_hold() -> None:
    modules = [path for path in SOURCES if ">>>" in path.read_text()]
    line = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--doctest-modules", *map(str, modules)]
    result = subprocess.run(line, cwd=ROOT, capture_output=True, text=True, check=False)

    assert modules
    assert result.returncode == 0, result.stdout


CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
CHANGELOG = (ROOT / "CHANGELOG.md").read_text()


def test_ci_runs_the_checks() -> None:
    lines = (ROOT / ".ci/run").read_text() + (ROOT / ".ci/bare").read_text()
    steps = re.findall(r"^ *(?:make|\.ci/tests) (\S+)", lines, re.MULTILINE)

    assert {"check", "docs", "test-wheel", "test", "test-slow", "test-spark"} <= set(steps)


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_file_it_names_is_there(document: str) -> None:
    named = re.findall(
        r"`((?:tests|wald|scripts|docs|sidecars|\.ci)/[\w/.-]+|[A-Z]+\.md)", (ROOT / document).read_text()
    )

    assert [path for path in named if not (ROOT / path).exists()] == []


@pytest.mark.parametrize("document", ["CONTRIBUTING.md", "SECURITY.md"])
def test_every_part_of_a_page_that_it_names_is_there(document: str) -> None:
    named = re.findall(r'"([^"]+)" in `([^`]+\.md)`', (ROOT / document).read_text())

    assert [part for part, page in named if f"# {part}\n" not in (ROOT / page).read_text()] == []
    assert named or document == "CONTRIBUTING.md"


def test_the_version_is_that_of_the_newest_release() -> None:
    releases = re.findall(r"^## \[(\d[^]]*)\] - (\d{4}-\d\d-\d\d)$", CHANGELOG, re.MULTILINE)

    assert releases[0][0] == wald.__version__
    assert releases == sorted(releases, key=lambda release: release[1], reverse=True)


def test_the_modules_of_the_benchmarks_can_be_imported() -> None:
    """No other test loads most of these modules, and the type checker skips them."""
    modules = sorted(f"benchmarks.{path.stem}" for path in (ROOT / "scripts/benchmarks").glob("[!_]*.py"))
    assert "benchmarks.ledgers" in modules

    importing = f"import sys; sys.path.insert(0, 'scripts'); import {', '.join(modules)}"
    done = subprocess.run([sys.executable, "-c", importing], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
