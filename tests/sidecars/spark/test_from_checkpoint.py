"""``wald cursor from-checkpoint`` moves a cursor forward to a stream's progress, never backward or beyond the head."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from logs import Built
from running import output_of, refusal_of, wald

from wald.errors import InvalidInput, NotFound, Refused
from wald_spark.offsets import Offsets, Position, encode_offsets


@pytest.fixture
def built(tmp_path: Path) -> Built:
    built = Built(tmp_path / "log")
    built.lines("a", [b"x"] * 10)
    return built


def checkpoint(built: Built, last: int) -> Path:
    """Write the checkpoint of a stream on route a that has committed up to ``last``."""
    path = built.root.path.with_name("checkpoint")
    source = json.dumps(encode_offsets(Offsets({built.log_id.hex(): Position(0, last)}, frozenset("a"))))
    for folder, text in (("offsets", f"v1\n{{}}\n{source}"), ("commits", "v1\n{}")):
        (path / folder).mkdir(parents=True, exist_ok=True)
        (path / folder / "0").write_text(text)
    return path


def test_a_cursor_follows_a_stream(built: Built) -> None:
    line = ["cursor", "from-checkpoint", checkpoint(built, 7), "a", "--root", built.root.path, "--group", "spark"]
    first = wald(*line)
    assert (first.returncode, first.stdout) == (0, b"7\n")
    assert b"group spark is new on route a" in first.stderr
    line[2] = f"file://{line[2]}"
    assert output_of(*line) == b"7\n"
    checkpoint(built, 9)
    assert output_of(*line) == b"9\n"
    assert built.log.cursor("a", "spark").effective == 9


def test_it_refuses_what_would_lose_something(built: Built) -> None:
    line = ["cursor", "from-checkpoint", checkpoint(built, 7), "a", "--root", built.root.path]
    built.log.set_cursor("a", 8)
    assert refusal_of(*line)[0] == Refused.exit_code  # backwards
    checkpoint(built, 11)
    code, message, _ = refusal_of(*line)
    assert (code, "beyond the head" in message) == (Refused.exit_code, True)
    assert built.log.cursor("a").effective == 8
    nowhere = ["cursor", "from-checkpoint", built.root.path / "nowhere", "a", "--root", built.root.path]
    assert refusal_of(*nowhere)[0] == NotFound.exit_code
    code, message, hint = refusal_of("cursor", "from-checkpoint", "s3://lake/ck", "a", "--root", built.root.path)
    assert (code, message) == (InvalidInput.exit_code, "s3://lake/ck: a URL, but a directory is needed")
    assert "copy the checkpoint" in hint
