"""The programs of examples/http lose nothing while the gate is killed and restarted."""

import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import programs
import pytest
from contents import values
from gating import Gate
from running import TIMEOUT_SECONDS, eventually

import wald

EXAMPLES = Path(__file__).parents[3] / "examples/http"
BEFORE, LINES = 150, 400
Begin = Callable[..., subprocess.Popen[bytes]]


@pytest.fixture(scope="module")
def go_program(tmp_path_factory: pytest.TempPathFactory) -> str:
    go = programs.program("go")
    built = tmp_path_factory.mktemp("go") / "gate"
    environment = os.environ | {"GOCACHE": str(built.with_name("cache")), "GOFLAGS": "-mod=mod", "GO111MODULE": "off"}
    for verb in (["vet"], ["build", "-o", str(built)]):
        subprocess.run([go, *verb, str(EXAMPLES / "gate.go")], env=environment, check=True)
    return str(built)


@pytest.fixture(params=["python", "node", *(pytest.param(each, marks=pytest.mark.slow) for each in ("shell", "go"))])
def line(request: pytest.FixtureRequest) -> list[str]:
    """Return the command line of the example in a language."""
    match request.param:
        case "python":
            return [sys.executable, str(EXAMPLES / "gate.py")]
        case "node":
            return [programs.program("node"), str(EXAMPLES / "gate.mjs")]
        case "shell":
            programs.program("jq")
            return [programs.program("bash"), str(EXAMPLES / "gate.sh")]
    return [request.getfixturevalue("go_program")]


@pytest.fixture
def begin(line: list[str], gate: Gate, tmp_path: Path) -> Iterator[Begin]:
    """Return a function that starts the example with a verb; output goes to a file named after the verb."""
    environment = os.environ | {"WALD_GATE": f"http://127.0.0.1:{gate.port}"}
    with ExitStack() as files:

        def start(verb: str, *words: object) -> subprocess.Popen[bytes]:
            output = files.enter_context((tmp_path / verb).open("ab"))
            called = [*line, verb, *map(str, words)]
            process = subprocess.Popen(
                called, stdin=subprocess.PIPE, stdout=output, env=environment, start_new_session=True
            )
            started.append(process)
            return process

        started: list[subprocess.Popen[bytes]] = []
        yield start
        for process in started:
            end(process)


def end(process: subprocess.Popen[bytes]) -> None:
    """Send SIGTERM to a program and its children."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
    process.wait(TIMEOUT_SECONDS)
    assert process.stdin is not None
    process.stdin.close()


def printed(tmp_path: Path, verb: str) -> list[bytes]:
    return (tmp_path / verb).read_bytes().splitlines()


def test_a_program_outlives_the_gate(begin: Begin, gate: Gate, root: Path, tmp_path: Path) -> None:
    """A producer's records are stored once; a follower gets each once, in order; a worker gets each at least once."""
    lines = [b"line %d" % number for number in range(LINES)]
    last = tmp_path / "last"
    gate.make_group("billing")
    begin("work", "orders", "billing")
    following = begin("follow", "orders", last)
    storing = begin("store", "orders")
    assert storing.stdin is not None
    storing.stdin.write(b"".join(each + b"\n" for each in lines[:BEFORE]))
    storing.stdin.flush()
    eventually(lambda: printed(tmp_path, "store"))
    gate.kill()
    storing.stdin.write(b"".join(each + b"\n" for each in lines[BEFORE:]))
    storing.stdin.close()
    gate.start()
    eventually(lambda: len(printed(tmp_path, "follow")) >= 2)
    assert gate.stop() == 0
    gate.start()
    assert storing.wait(TIMEOUT_SECONDS) == 0
    eventually(lambda: len(printed(tmp_path, "follow")) >= LINES)
    eventually(lambda: set(printed(tmp_path, "work")) == set(lines))
    eventually(lambda: last.read_text().strip() == str(LINES))
    end(following)
    gate.post("/v1/routes/orders/records", b"later\n")
    begin("follow", "orders", last)
    eventually(lambda: printed(tmp_path, "follow")[-1] == b"later")

    assert values(root) == [*lines, b"later"]
    assert printed(tmp_path, "follow") == [*lines, b"later"]
    eventually(lambda: gate.get("/v1/routes/orders/groups/billing/pending").body == b"")
    assert Counter(printed(tmp_path, "work")).total() >= LINES


def test_a_worker_waits_until_another_process_lets_go_of_its_group(begin: Begin, gate: Gate, tmp_path: Path) -> None:
    gate.post("/v1/routes/orders/records", b"1\n2\n")
    with wald.WorkGroup(gate.root, "orders", "billing"):
        working = begin("work", "orders", "billing")
        eventually(lambda: b'status="423"' in gate.get("/metrics").body)
    eventually(lambda: printed(tmp_path, "work") == [b"1", b"2"])
    eventually(lambda: gate.get("/v1/routes/orders/groups/billing/pending").body == b"")
    assert working.poll() is None


def test_what_does_not_pass_is_reported_and_ends_a_program(begin: Begin, tmp_path: Path) -> None:
    storing = begin("store", "nowhere")
    storing.communicate(b"lost\n", timeout=TIMEOUT_SECONDS)

    assert storing.returncode != 0
    assert printed(tmp_path, "store") == []
