"""`wald-gate token` writes the token file: atomically, durably, and without the tokens themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gating import Gate
from running import Daemon, launched, refused, run, sidecar

from wald.errors import InvalidInput, NotFound
from wald_gate.auth.tokens import clients_in

ORDERS = "/v1/routes/orders/records"


def token(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run(sidecar("gate", "token", *arguments))


def test_a_token_that_was_added_is_one_for_the_gate(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    made = token("add", "shop", "--tokens", path, "--read", "ord*").stdout.decode().strip()

    assert made.startswith("wald_")
    assert made not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    with Gate(daemon.root, "--tokens", path) as gate:
        assert gate.get(ORDERS, authorization=f"Bearer {made}").status == 200
        assert gate.get(ORDERS, authorization=f"Bearer {made[:-1]}").status == 401
        assert gate.get(f"{ORDERS}?access_token={made}").status == 401
        refusal = gate.get(ORDERS)
        assert refusal.headers["www-authenticate"].startswith("Bearer")
        assert made not in gate.log


def test_a_token_without_rights_is_for_metrics(daemon: Daemon, tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    added = token("add", "prom", "--tokens", path)

    assert b"prom may: no route, only /metrics" in added.stderr
    assert b"prom: token: no route, only /metrics" in token("list", "--tokens", path).stdout
    authorization = f"Bearer {added.stdout.decode().strip()}"
    with Gate(daemon.root, "--tokens", path) as gate:
        assert b"wald_gate_stored_records_total" in gate.get("/metrics", authorization=authorization).body
        assert gate.get(ORDERS, authorization=authorization).status == 403
        assert gate.post(ORDERS, b"1\n").status == 401


def test_add_says_what_the_client_may(tmp_path: Path) -> None:
    rights = ("--read", "orders", "--write", "app.*", "--work", "orders/billing", "--work", "app.*")
    added = token("add", "shop", "--tokens", tmp_path / "tokens", *rights)

    assert b"wald-gate: shop may: read orders; write app.*; work orders/billing app.*\n" in added.stderr
    assert json.loads((tmp_path / "tokens").read_bytes())["work"] == ["orders/billing", "app.*"]
    assert "moves its cursor. wald-reclaim may delete records that every group has passed." in " ".join(
        token("add", "--help").stdout.decode().split()
    )


def test_a_file_that_is_not_there_is_not_found_and_the_hint_makes_it(tmp_path: Path, root: Path) -> None:
    path = tmp_path / "none"
    for done in (token("list", "--tokens", path), run(sidecar("gate", "--root", root, "--check", "--tokens", path))):
        code, message, hint = refused(done)
        assert (code, f"{path}: no such token file" in message) == (NotFound.exit_code, True)
        assert f"wald-gate token add NAME --tokens {path}" in hint


def test_tokens_that_are_added_at_once_are_all_there(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    adding = [launched(sidecar("gate", "token", "add", f"c{n}", "--tokens", path, "--admin")) for n in range(6)]

    assert [each.wait() for each in adding] == [0] * 6
    assert {each.name for each in clients_in(path)} == {f"c{n}" for n in range(6)}
    assert os.listdir(tmp_path) == ["tokens"]


def test_owner_group_and_mode_of_a_file_stay(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch()
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 54321, 54322)
    before = path.stat()

    assert token("add", "shop", "--tokens", path, "--admin").returncode == 0
    assert token("remove", "shop", "--tokens", path).returncode == 0

    after = path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert clients_in(path) == []


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("add", "shop", "--admin"), InvalidInput.exit_code, "client 'shop' already exists"),
        (("add", "a b", "--admin"), InvalidInput.exit_code, "the name is 'a b'"),
        (("add", "new", "--read", "../x"), InvalidInput.exit_code, "read is a list of routes"),
        (("add", "new", "--read", "orders/billing"), InvalidInput.exit_code, "read is a list of routes"),
        (("add", "new", "--work", "a/b/c"), InvalidInput.exit_code, "work is a list of routes and groups"),
        (("add", "new", "--work", "orders/"), InvalidInput.exit_code, "work is a list of routes and groups"),
        (("add", "new", "--admin", "--user", "a", "--certificate", "b"), InvalidInput.exit_code, "or a certificate"),
        (("remove", "nobody"), NotFound.exit_code, "there is no client 'nobody'"),
    ],
)
def test_what_is_refused_changes_nothing(tmp_path: Path, arguments: tuple[str, ...], code: int, said: str) -> None:
    path = tmp_path / "tokens"
    token("add", "shop", "--tokens", path, "--read", "orders", "--write", "app.*")
    before = path.read_bytes()

    found, message, _ = refused(token(*arguments, "--tokens", path))

    assert (found, said in message) == (code, True), message
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line",
    [
        '{"name": "a", "user": "a", "reed": ["x"]}',
        '{"name": "a", "user": "a", "read": "orders"}',
        '{"name": "a", "user": "a", "admin": 1}',
        '{"name": "a", "user": "a", "certificate": "a"}',
        '{"name": "a", "sha256": "00"}',
        '{"name": "a"}',
        '["a"]',
        "not json",
        '{"name": "a", "user": "b"}\n{"name": "c", "user": "b"}',
    ],
)
def test_a_line_that_could_be_misread_is_refused(tmp_path: Path, line: str) -> None:
    path = tmp_path / "tokens"
    path.write_text(line)

    with pytest.raises(InvalidInput, match="not a token of wald-gate"):
        clients_in(path)


def test_the_command_needs_nothing_that_the_extra_brings(tmp_path: Path) -> None:
    names = ("httptools", "msgspec", "starlette", "uvloop", "jinja2")
    script = f"import sys; sys.modules.update(dict.fromkeys({names})); from wald_gate.command import main; main()"
    line = [sys.executable, "-c", script, "token", "list", "--tokens", str(tmp_path / "tokens")]
    token("add", "shop", "--tokens", tmp_path / "tokens", "--read", "orders", "--write", "app.*")
    token("add", "ann", "--tokens", tmp_path / "tokens", "--user", "ann", "--admin")

    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.stdout == "shop: token: read orders; write app.*\nann: user ann: admin\n", done.stderr
