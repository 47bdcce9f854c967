"""Every question of docs/questions.md: its command gives the expected answer on a known log."""

import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from damage import flip_bit
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of, run, sidecar
from typed import type_page

from wald.format.names import Kind, segment_name
from wald.work.group import WorkGroup


def answering(root: Path) -> Daemon:
    """Start a daemon on the log of docs/questions.md.

    web: 1 to 3 archived and reclaimed, 5 and 6 not processed; orders: 4 processed and reclaimed, 7 leased by a worker.
    """
    daemon = Daemon(root, env={"WALD_STALL_TIMEOUT": "30s"})
    for route in ("web", "orders"):
        output_of("route", "add", route, "--root", root)
    _send(root, "web", b"one\ntwo\nthree\n")
    _send(root, "orders", b"first\n")
    _cut(root, 1)
    _run("archive", "web", "--root", root)
    output_of("cursor", "set", "orders", 4, "--root", root)
    _send(root, "web", b"five\nsix\n")
    _cut(root, 5)
    _send(root, "orders", b"stuck\n")
    _run("reclaim", "--root", root, "--grace", 0)
    assert not (root / "segments" / segment_name(1, Kind.SEALED)).exists()
    daemon.kill()
    daemon.start_again()
    with WorkGroup(root, "orders") as work:
        assert work.lease("worker-1", lease_for=86_400, wait=TIMEOUT_SECONDS)
    return daemon


def _send(root: Path, route: str, lines: bytes) -> None:
    output_of("append", route, "--root", root, stdin=lines)


def _cut(root: Path, base: int) -> None:
    """Complete the segment that begins with ``base``, and wait until it is sealed."""
    output_of("cut", "--root", root)
    directory = root / "segments"
    raw, sealed = (directory / segment_name(base, kind) for kind in (Kind.RAW, Kind.SEALED))
    eventually(lambda: sealed.exists() and not raw.exists())


def _run(name: str, *arguments: object) -> None:
    run(sidecar(name, *arguments)).check_returncode()


ROOT = Path(__file__).parents[2]
# The beginning of each question → exit code and expected parts of the answer.
ANSWERS: dict[str, tuple[int, tuple[str, ...]]] = {
    "Is the daemon alive": (0, (r"the daemon \(pid \d+; epoch 2, since \S+\) runs", r"OK$")),
    "Did the daemon crash": (0, (r"epoch 1 was killed .* found at 20\S+Z: nothing acknowledged was lost",)),
    "Which settings": (
        0,
        (r"sync +\"commit\" +default", r"stall_timeout +30\.0 +WALD_STALL_TIMEOUT|stall_timeout +\"30s\""),
    ),
    "Why is the disk": (0, (r"pinned by web/processed \(at 3, needs 6\)", r"orders +processed +6 +1 ")),
    "How long until": (0, (r"space +.* are free",)),
    "What is in record": (0, (r"route +web", r"\nfive$")),
    "Which producer": (0, (r"sent by +socket, user \d+, process \d+",)),
    "What became": (0, (r"1: archived: in bundle \S+/web-0+1\.tar\.zst",)),
    "Is 14:00": (12, (r"not all here: 2 records, 5 to 6", r"all of these are in the archive")),
    "What has this group": (0, (r"left +2 records, 5 to 6",)),
    "Which work group": (0, (r"orders +processed +none +6 +7 +1 +1 +0 +0 +0 ",)),
    "Which worker has": (0, (r"\n *7 +7 +worker-1 .* 1\n",)),
    "How do I skip": (0, (r"web/processed is at 5; skipped: 1 record",)),
    "Which record": (12, (r"^6 web six\n", r"RECLAIM has removed records 1 to 4")),
    "What was deleted": (0, (r"reclaimed", r"allowed")),
    "Is the log whole": (0, (r"OK: \d+ ok, \d+ info, 0 errors",)),
    "What would a repair": (0, (r"OK",)),
    "Is the archive whole": (0, (r"OK",)),
    "How do I get archived": (0, (r"^one\ntwo\nthree$",)),
    "How do I make a log of": (0, (r"^web: 3 records\n", r"records 1 to 3 of log", r"not in an archive: cursors")),
    "What is this file": (0, (r"is +the head", r"delete it\? +no: ")),
    "Which promises": (14, (r"warn",)),
}
ROWS = re.findall(r"^\| ([^|`]+) \| `([^`]+)` \|$", (ROOT / "docs/questions.md").read_text(), re.MULTILINE)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("questions") / "log"
    with answering(path):
        yield path


def test_every_question_has_an_answer_here_and_the_page_can_be_typed(root: Path, tmp_path: Path) -> None:
    # Every question has an answer here.
    asked = [question for question, _ in ROWS]
    assert [question for question in asked if not any(map(question.startswith, ANSWERS))] == []
    assert [known for known in ANSWERS if not any(question.startswith(known) for question in asked)] == []

    # The page can be typed.
    type_page("docs/questions.md", at=tmp_path, root=root)


def copied(root: Path, at: Path) -> Path:
    """Copy the log without its daemon, for `wald repair` and for commands that change routes."""
    return Path(shutil.copytree(root, at / "copy", ignore=shutil.ignore_patterns("wald.sock", "*.tmp")))


def asked(command: str, root: Path) -> tuple[int, str]:
    """Split a command like a shell, run it, and return exit code and output."""
    program, *arguments = shlex.split(command.replace("$WALD_ROOT", str(root)))
    line = [sys.executable, "-m", program.replace("-", "_"), *arguments]
    done = run(line, env={"WALD_ROOT": str(root)})
    return done.returncode, (done.stdout + done.stderr).decode().rstrip("\n")


@pytest.mark.parametrize(("question", "command"), ROWS, ids=[question for question, _ in ROWS])
def test_a_question_is_answered(question: str, command: str, root: Path, tmp_path: Path) -> None:
    code, answers = next(answer for known, answer in ANSWERS.items() if question.startswith(known))
    command = command.replace("--since 14:00 --until 14:05", "--since 1h --until now")
    found, said = asked(command, copied(root, tmp_path) if command.startswith(("wald repair", "wald route")) else root)

    assert found == code, said
    assert [answer for answer in answers if not re.search(answer, said)] == [], said


def test_the_answers_change_with_damage(root: Path, tmp_path: Path) -> None:
    """The segment with records 5 and 6 is damaged: every command reports damage and nothing else."""
    copy = copied(root, tmp_path)
    segment = copy / "segments" / segment_name(5, Kind.SEALED)
    flip_bit(segment, 20)

    for command in ("wald verify", "wald show 6", "wald where 6", f"wald inspect {segment}"):
        code, said = asked(command, copy)
        assert (command, code) == (command, 4), said
    code, said = asked("wald repair --dry-run", copy)
    assert (code, "gives up 2 records: 5 to 6" in said) == (9, True), said
    code, said = asked("wald where --route web --since 1h", copy)
    assert (code, "damaged" in said) == (4, True), said
