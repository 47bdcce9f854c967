"""Records longer than ``record_max_bytes`` are rejected, however the body is split into chunks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest
from gating import Gate
from running import Daemon

import wald

ORDERS = "/v1/routes/orders/records"
LIMIT = 100


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gate]:
    """A gate with a record limit of 100 bytes."""
    root = tmp_path_factory.mktemp("longest") / "log"
    config = root.with_name("gate.toml")
    config.write_text(f"[limits]\nrecord_max_bytes = {LIMIT}\n")
    with Daemon(root) as daemon:
        daemon.ask("ROUTE ADD orders")
        with Gate(root, "--config", config) as gate:
            yield gate


def test_a_line_that_is_too_long_is_refused(strict: Gate) -> None:
    lengths = (LIMIT + 1, 1000, 131_071, 131_072, 131_073, 200_000)
    befores, ends = (b"", b"a\n", b"%s\n" % (b"b" * LIMIT) * 3), (b"", b"\n", b"\nc\n")
    for length, before, end in product(lengths, befores, ends):
        answer = strict.post(ORDERS, before + b"x" * length + end)

        assert (answer.status, answer.json()["code"]) == (413, "too-large"), (length, before, end)


@pytest.mark.parametrize("media_type", ["application/x-ndjson", "application/octet-stream"])
def test_so_are_objects_and_bytes(strict: Gate, media_type: str) -> None:
    assert strict.post(ORDERS, b'{"value": "%s"}' % (b"x" * LIMIT), media_type).status == 413


def test_so_are_lines_that_have_a_key(strict: Gate) -> None:
    headers = {"Content-Type": "text/plain", "Idempotency-Key": "one"}

    assert strict.ask("POST", ORDERS, b"x" * (LIMIT + 1), headers).status == 413


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_lines_that_are_as_long_as_may_be_are_stored(strict: Gate, end: bytes) -> None:
    lines = [b"", b"y", b"x" * LIMIT, b"", b"z" * (LIMIT - 1)] * 1000 + [b"x" * LIMIT]

    stored = strict.post(ORDERS, b"\n".join(lines) + end).json()

    records = wald.open(strict.root).records("orders", start=stored["first"], stop=stored["last"])
    assert [record.value for record in records] == lines
