"""Commands on the pages: every executable block is run against a separate log."""

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import pytest
from archives import archive
from logs import Built
from pages import PAGES, blocks
from running import Daemon, output_of
from typed import type_page, typed

from wald.settings import load
from wald_archive.bundle import Records
from wald_archive.codecs import Codec
from wald_gate.settings import load as load_gate

TYPED = [
    page
    for page in PAGES
    if any(not block.mode and block.language in ("sh", "console", "python") for block in blocks(page))
]
# Separate tests run these: they check the output, or need a separate machine.
APART = {
    "docs/questions.md",
    "docs/archive.md",
    "docs/files.md",
    "docs/install.md",
    "docs/operations.md",
    "docs/systemd.md",
}


def nothing(at: Path) -> AbstractContextManager[object]:
    """No setup: the page creates the log."""
    return nullcontext()


def running(at: Path, **lines: bytes) -> AbstractContextManager[object]:
    """A daemon with these routes and their records."""
    daemon = Daemon(at / "log")
    for route, text in lines.items():
        output_of("route", "add", route, "--root", daemon.root)
        output_of("append", route, "--root", daemon.root, stdin=text)
    return daemon


def with_orders(at: Path) -> AbstractContextManager[object]:
    """Route orders has two records, the second of which makes a command of the page fail."""
    for name, command in (("import.sh", "cat"), ("handle.sh", "cat"), ("import-strictly.sh", "! grep -q second")):
        (at / name).write_text(f"#!/bin/sh\n{command}\n")
        (at / name).chmod(0o755)
    return running(at, orders=b"first\nsecond\n", dead_letter=b"")


with_lines = partial(running, access=b"hello\none\ntwo\n")
with_empty_orders = partial(running, orders=b"")


def with_backlog(at: Path) -> AbstractContextManager[object]:
    """Three segments: one that all groups have read, one that route idle pins, and the active one."""
    built = Built(at / "log", now_ns=time.time_ns())
    for number in range(2):
        built.lines("access", [b"line %d" % number] * 1000)
        built.cut()
        built.lines("idle", [b"line"])
    built.seal()
    built.log.set_cursor("access", 2002)
    return nullcontext()


PREPARED: dict[str, Callable[[Path], AbstractContextManager[object]]] = {
    "README.md": nothing,
    "docs/doctor.md": with_lines,
    "docs/drain.md": with_orders,
    "docs/getting-started.md": nothing,
    "docs/http.md": with_empty_orders,
    "docs/protocol.md": with_lines,
    "docs/python.md": with_orders,
    "docs/reading.md": with_lines,
    "docs/retention.md": with_backlog,
    "docs/troubleshooting.md": with_lines,
    "docs/users.md": with_empty_orders,
    "docs/work.md": with_orders,
}


@pytest.mark.parametrize("page", sorted(set(TYPED) - APART))
def test_a_page_can_be_typed(page: str, tmp_path: Path) -> None:
    """All blocks run in order, in one shell."""
    with PREPARED[page](tmp_path):
        type_page(page, at=tmp_path, root=tmp_path / "log")


def settings(page: str, mode: str) -> str:
    """Return all settings of a page: those of the gate with mode "gate", those of the daemon without a mode."""
    return "".join(block.text for block in blocks(page) if (block.language, block.mode) == ("toml", mode))


SETTINGS = [page for page in PAGES if settings(page, "")]


@pytest.mark.parametrize("page", [page for page in SETTINGS if page != "docs/users.md"])
def test_settings_can_be_loaded(page: str, tmp_path: Path) -> None:
    """The settings of docs/users.md name groups that exist only on the machine of tests/deploy/test_users.py."""
    path = tmp_path / "wald.toml"
    path.write_text(settings(page, ""))

    assert load(path, {}).routes


@pytest.mark.parametrize("page", [page for page in PAGES if settings(page, "gate")])
def test_settings_of_the_gate_can_be_loaded(page: str, tmp_path: Path) -> None:
    path = tmp_path / "gate.toml"
    path.write_text(settings(page, "gate"))

    assert load_gate(path, {}).groups


def shell_lines(page: str, number: int) -> list[str]:
    """Return the input of the nth block of a page."""
    return [block.text for block in blocks(page) if block.language == "sh"][number].splitlines()


def test_a_log_can_be_read_without_wald_as_it_says(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("access", [b"one", b"two"])
    built.cut()
    built.columns("access", [b"line two of it"], keys=[b"key"])
    built.cut()
    built.seal()
    built.log.set_cursor("access", 3)
    lines = shell_lines("docs/files.md", 0)
    head, cursor, sealed, whole, digest, found = (typed(line, at=tmp_path, root=built.root.path) for line in lines)

    assert head == built.root.head.read_text()
    assert cursor == built.root.cursor("access", "processed").read_text()
    assert whole == ""
    assert [digest.split()[0], 2] == [json.loads(sealed.splitlines()[0])["sha256"], len(sealed.splitlines())]
    assert found.count("two") == 2


def test_an_archive_can_be_made_and_read_without_wald_as_it_says(tmp_path: Path) -> None:
    """Two bags, with text and with JSON: every digest is checked, and every record is returned in order."""
    built = Built(tmp_path / "log")
    for number in range(2):
        built.lines("audit", [b"line %d" % number, b"and another"])
        built.columns("audit", [b"value"], keys=[b"key %d" % number])
        archive(built, tmp_path / "cold", "audit", size=Records(2), codec=Codec.GZ)
    checking, reading = shell_lines("docs/archive.md", 1)
    checked = typed(checking, at=tmp_path, root=built.root.path).splitlines()
    reported = typed(reading, at=tmp_path, root=built.root.path).splitlines()

    assert [line.partition(": ")[2] for line in checked] == ["OK"] * 4
    assert [line if line[0] != "{" else json.loads(line)["key"] for line in reported] == [
        "line 0",
        "and another",
        "key 0",
        "line 1",
        "and another",
        "key 1",
    ]


def test_an_archive_is_made_proven_and_restored_as_it_says(tmp_path: Path) -> None:
    built = Built(tmp_path / "log")
    built.lines("audit", [b"line %d" % number for number in range(2500)])
    reported = typed("\n".join(shell_lines("docs/archive.md", 0)), at=tmp_path, root=built.root.path)

    assert reported.endswith("".join(f"line {number}\n" for number in range(999, 2000)))

    made = typed("\n".join(shell_lines("docs/archive.md", 2)), at=tmp_path, root=built.root.path)

    assert made.splitlines()[-1].startswith("OK: ")
    last = json.loads((tmp_path / "restored.json").read_text().splitlines()[-1])
    assert (last["sequence"], last["value"]) == (2500, "line 2499")
