"""A client without admin rights never sees the path of the root, whatever is wrong with the log."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
from gating import Gate, entry
from running import Daemon, eventually, reclaim

import wald as library
from wald.errors import NotFound
from wald.format.names import Kind, segment_name
from wald_gate import problems
from wald_gate.problems import HttpError

RECORDS = "/v1/routes/orders/records"
READER, CHIEF = {"Authorization": "Bearer reader-token"}, {"Authorization": "Bearer chief-token"}


@pytest.fixture(scope="module")
def reclaimed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate on a log whose first record is reclaimed and whose third is unreadable."""
    root = tmp_path_factory.mktemp("paths") / "log"
    tokens = root.with_name("tokens")
    rights = ["orders", "payroll"]
    tokens.write_text(entry("reader", read=rights, write=rights, work=rights) + entry("chief", admin=True))
    with Daemon(root) as daemon:
        for route in rights:
            daemon.ask(f"ROUTE ADD {route}")
        daemon.ask("PUB orders 2\nx\n")
        daemon.ask("CUT")
        daemon.ask("PUB orders 2\nx\n")
        daemon.ask("PUB orders 2\ny\n")
        library.open(root).set_cursor("orders", 1, "billing")
        reclaim(root, "--grace", "0")
        position = library.open(root).where(3).position
        assert position is not None
        with (root / "segments" / segment_name(2, Kind.RAW)).open("r+b") as segment:
            segment.seek(position)
            segment.write(b"\x55" * 8)
        (root / "routes" / "orders" / "cursors" / "broken.cursor").write_bytes(b"no cursor\n")
        with Gate(root, "--tokens", tokens) as gate:
            yield gate


@pytest.mark.parametrize(
    ("path", "status"),
    [
        (f"{RECORDS}?from=1", 410),
        (f"{RECORDS}?from=3", 500),
        (f"{RECORDS}?from=99", 404),
        (f"{RECORDS}?from=cursor&group=broken", 500),
        ("/v1/routes", 200),
        ("/v1/routes/orders/groups", 200),
        ("/v1/routes/orders/cursors/broken", 500),
        ("/", 200),
        ("/routes", 200),
        ("/routes/orders", 200),
        ("/records?route=orders", 200),
        ("/records?route=orders&from=1", 200),
        ("/records?route=orders&from=99", 404),
        ("/records?route=orders&follow=1", 200),
        ("/records/1", 403),
        ("/records/1/value", 403),
        ("/records/3", 403),
        ("/records/3/value", 403),
        ("/readyz", 200),
        ("/metrics", 200),
    ],
)
def test_no_answer_to_a_reader_names_the_root(reclaimed: Gate, path: str, status: int) -> None:
    answer = reclaimed.ask("GET", path, headers=READER)

    assert answer.status == status, answer.body
    assert str(reclaimed.root.parent) not in answer.body.decode()


def test_a_reader_still_learns_what_is_missing_and_an_admin_where(reclaimed: Gate) -> None:
    path = f"{RECORDS}?from=1"
    by_reader, by_chief = (reclaimed.ask("GET", path, headers=each).json()["detail"] for each in (READER, CHIEF))

    assert by_reader == "segments: RECLAIM has removed record 1: 1 record of route orders is missing"
    assert by_chief == f"{reclaimed.root}/{by_reader}"


def test_the_page_of_a_damaged_log_names_no_root_to_a_reader(reclaimed: Gate) -> None:
    head = reclaimed.root / "head"
    kept = head.read_bytes()
    try:
        head.write_bytes(b"x" * len(kept))
        eventually(lambda: "head" in reclaimed.ask("GET", "/", headers=CHIEF).body.decode().partition("notice bad")[2])
        for path in ("/", "/routes/orders", "/records?route=orders", RECORDS):
            answer = reclaimed.ask("GET", path, headers=READER)
            assert str(reclaimed.root.parent) not in answer.body.decode(), path
    finally:
        head.write_bytes(kept)


@pytest.mark.parametrize(
    ("error", "detail"),
    [
        (OSError(errno.EIO, "Input/output error", "ROOT/segments/1.wal"), "segments/1.wal: Input/output error"),
        (OSError(errno.EMFILE, "Too many open files", "ROOT"), "Too many open files"),
        (PermissionError(errno.EACCES, "Permission denied", "ROOT/head"), "head: permission denied"),
        (NotFound("there is no log in ROOT"), "there is no log in the log"),
        (NotFound("ROOT2/head is not in ROOT, but in ROOT/old"), "ROOT2/head is not in the log, but in old"),
        (HttpError(410, "lost", "ROOT/segments: lost; see ROOT/lost", more={"next": 2}), "segments: lost; see lost"),
    ],
)
def test_an_error_loses_the_root_and_keeps_the_rest(reclaimed: Gate, error: Exception, detail: str) -> None:
    root = library.open(reclaimed.root).root
    with_root = _with_root(error, reclaimed.root)

    shown = problems.problem(problems.for_client(with_root, root, "orders", is_admin=False))
    to_admin = problems.problem(problems.for_client(with_root, root, "orders", is_admin=True))

    assert detail.replace("ROOT2", f"{reclaimed.root}2") in bytes(shown.body).decode()
    assert str(reclaimed.root).encode() in bytes(to_admin.body)
    assert (shown.status_code, b"next" in bytes(shown.body)) == (to_admin.status_code, b"next" in bytes(to_admin.body))


def _with_root(error: Exception, root: Path) -> Exception:
    """Return the same error with this root's path."""
    if isinstance(error, OSError):
        return type(error)(error.errno, error.strerror, str(error.filename).replace("ROOT", str(root)))
    if isinstance(error, HttpError):
        return HttpError(error.status, error.code, error.message.replace("ROOT", str(root)), more=error.more)
    assert isinstance(error, NotFound)
    return NotFound(error.message.replace("ROOT", str(root)))
