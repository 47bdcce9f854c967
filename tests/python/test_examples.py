"""The programs in examples/ work as described when run by a user, and pass a strict type checker."""

import functools
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of

import wald

EXAMPLES = Path(__file__).parents[2] / "examples"
UNTYPED = {"totals"}  # pyarrow has no types


def line(name: str, *arguments: object) -> list[str]:
    return [sys.executable, str(EXAMPLES / f"{name}.py"), *map(str, arguments)]


def output(name: str, *arguments: object) -> str:
    done = subprocess.run(line(name, *arguments), capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.fixture
def shop(daemon: Daemon) -> Path:
    """The root of a log with the routes that the programs use."""
    for route in ("orders", "invoices"):
        output_of("route", "add", route, "--root", daemon.root)
    return daemon.root


def test_produce(shop: Path) -> None:
    assert output("produce", shop) == "durable: records 1 to 3\n"
    found = [(record.key, record.value, record.headers) for record in wald.open(shop).records("orders")]
    assert found == [
        (b"ann", b"ann 1", b'{"from":"web"}'),
        (b"bob", b"bob 2", b'{"from":"shop"}'),
        (b"cleo", b"cleo 3", None),
    ]


def is_billed(shop: Path, sequence: int) -> bool:
    return wald.open(shop).cursor("orders", "billing").sequence == sequence


def test_consume(shop: Path) -> None:
    """The program follows the route, and a second run continues after the last processed record."""
    for run in (0, 1):
        output("produce", shop)
        expected = [f"order {3 * run + 1} of ann: ann 1", f"order {3 * run + 2} of bob: bob 2"]
        with subprocess.Popen(line("consume", shop), stdout=subprocess.PIPE, text=True) as consuming:
            assert consuming.stdout is not None
            lines = [consuming.stdout.readline().rstrip("\n") for _ in range(3)]
            assert lines == [*expected, f"order {3 * run + 3} of cleo: cleo 3"]
            eventually(functools.partial(is_billed, shop, 3 * run + 3))
            consuming.send_signal(signal.SIGTERM)
            assert consuming.wait(TIMEOUT_SECONDS) == 0


def test_log(shop: Path) -> None:
    assert output("log", shop) == ""
    first, second, third = (record.value.decode() for record in wald.open(shop).records("orders"))
    assert (first, third) == ("INFO open", "INFO closed")
    assert re.fullmatch(r"(?s)ERROR no customers\nTraceback.*ZeroDivisionError: division by zero", second)


def test_totals(shop: Path) -> None:
    output("produce", shop)
    assert output("totals", shop, 3) == "3 {b'ann': 5, b'bob': 5, b'cleo': 6}\n"


def test_pipeline(shop: Path) -> None:
    output("produce", shop)
    assert output("pipeline", shop) == "durable: invoices 4 to 6\n"
    assert output("pipeline", shop) == ""
    found = [(record.key, record.value, record.headers) for record in wald.open(shop).records("invoices")]
    assert found[0] == (b"ann", b"invoice for ann 1", b'{"order":"1"}')
    assert len(found) == 3


@pytest.mark.parametrize("program", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_without_arguments_it_shows_its_usage(program: str) -> None:
    done = subprocess.run(line(program), capture_output=True, text=True, check=False)

    assert (done.returncode, done.stderr.splitlines()[1:]) == (1, [])
    assert done.stderr.startswith(f"usage: {program}.py ROOT")
    assert done.stderr in (EXAMPLES / f"{program}.py").read_text()


def test_every_program_is_listed_and_tested() -> None:
    programs = {path.stem for path in EXAMPLES.glob("*.py")}

    assert set(re.findall(r"\((\w+)\.py\)", (EXAMPLES / "README.md").read_text())) == programs
    assert {name.removeprefix("test_") for name in globals() if name.removeprefix("test_") in programs} == programs


def test_a_strict_type_checker_finds_no_any(tmp_path: Path) -> None:
    """Every value that a program gets from wald has a type."""
    programs = sorted(path for path in EXAMPLES.glob("*.py") if path.stem not in UNTYPED)
    options = ["--config-file=", "--strict", "--disallow-any-expr", "--follow-imports=silent"]
    mypy = [sys.executable, "-m", "mypy", *options, *map(str, programs)]
    done = subprocess.run(mypy, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout
