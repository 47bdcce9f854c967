"""The command line, the settings file and the token file of a gate; errors name the setting."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gating import ORDERS, Gate, entry
from running import Daemon, launched, refused, run, sidecar

from wald.errors import InvalidInput, NotFound
from wald_gate.auth.tokens import clients_in
from wald_gate.settings import GroupSettings, Settings, load


def written(directory: Path, text: str) -> Path:
    path = directory / "gate.toml"
    path.write_text(text)
    return path


def test_the_command_line_comes_before_the_file_and_the_file_before_the_defaults(tmp_path: Path) -> None:
    group = '[groups."orders/billing"]\norder = "key"\nmax_tries = 5\nwindow = 10\n'
    limits = '[limits]\nbody_max_bytes = "64MiB"\n'
    path = written(tmp_path, f'uds = "a.sock"\nlisten = "127.0.0.1:1"\n{limits}{group}')

    found = load(path, {"listen": "127.0.0.1:2", "hosts": ("log.example",)})

    assert (found.listen, found.uds, found.hosts, found.key) == ("127.0.0.1:2", "a.sock", ("log.example",), "")
    assert (found.limits.body_max_bytes, found.limits.json_max_bytes) == (64 << 20, 4 << 20)
    assert found.groups["orders/billing"] == GroupSettings("key", 5, "dead_letter", 10)
    assert load(None, {}) == Settings()
    assert GroupSettings() == GroupSettings("log", 0, "dead_letter", 1_000_000)


def test_what_is_wrong_is_named_with_its_line(tmp_path: Path) -> None:
    for text, message, hint in [
        ("\nlistn = 'a'", "gate.toml:2: there is no setting 'listn'", "did you mean 'listen'?"),
        ("listen = 7700", "listen must be HOST:PORT", "wald-gate serve --help"),
        ("body_max_bytes = 1", "is above all tables", "move body_max_bytes to [limits]"),
        ("[limits]\ntokens = 'a'", "gate.toml:2: 'tokens' is inside [limits]", "above the first table"),
        ("[limits]\nhead_timeout = '2d'", "gate.toml:2: limits.head_timeout must be", "wald-gate serve --help"),
        ("limits = 1", "limits must be a table", "write a table: [limits]"),
        ('[groups."orders"]', "is not a route and a group", "ROUTE/GROUP"),
        ('[groups."../billing"]', "gate.toml:1: ", "letters"),
        ('[groups."a/b"]\n\nordr = "key"', "gate.toml:3: there is no setting 'ordr'", "did you mean 'order'?"),
        ('[groups."a/b"]\ndead_letter = "a"', "its own dead-letter route", "dead_letter = ROUTE"),
        ('[groups."dead_letter/b"]\nmax_tries = 2', "its own dead-letter route", "dead_letter = ROUTE"),
        (
            "trusted_proxies = ['10.0.0.1/8']",
            "gate.toml:1: trusted_proxies must be a list of",
            "wald-gate serve --help",
        ),
        ("hosts = 'a b'", "hosts must be a list of host names", "wald-gate serve --help"),
    ]:
        path = written(tmp_path, text)

        with pytest.raises(InvalidInput) as error:
            load(path, {})

        assert message in error.value.message
        assert hint in error.value.hint


def test_check_reads_the_files_that_the_settings_name(tmp_path: Path, root: Path) -> None:
    """The check does not start the server, and works without a log."""
    line = sidecar("gate", "--root", root, "--check", "--config", written(tmp_path, "tokens = 'none'"))
    assert run(line).returncode != 0

    line[-1] = str(written(tmp_path, "[limits]\nconnections_max = 0"))
    assert refused(run(line))[0] == InvalidInput.exit_code
    line[-1] = str(written(tmp_path, "[limits]\nconnections_max = 9"))
    done = run(line)
    assert done.returncode == 0
    assert f"{root}: there is no log here, which the gate needs to start" in done.stderr.decode()


def test_check_says_what_a_file_of_tokens_does_not_do(daemon: Daemon, tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    line = sidecar("gate", "--root", daemon.root, "--check", "--tokens", tokens)
    tokens.touch()
    assert (
        run(line).stderr.decode() == f"wald-gate: {tokens}: it names no client, so every request over TCP is refused\n"
    )

    added = run(sidecar("gate", "token", "add", "a", "--tokens", tokens, "--user", "nosuchuser", "--admin"))
    assert (added.returncode, b"there is no user 'nosuchuser' on this machine" in added.stderr) == (0, True)
    assert run(line).stderr.decode() == f"wald-gate: {tokens}: there is no user 'nosuchuser' on this machine\n"

    added = run(sidecar("gate", "token", "add", "b", "--tokens", tokens, "--certificate", "*.example", "--admin"))
    assert b"'*' is not a wildcard" in added.stderr


def test_tables_of_groups_whose_routes_are_not_there_are_said(daemon: Daemon, tmp_path: Path) -> None:
    known, typo = '[groups."orders/packing"]\n', '[groups."oders/packing"]\ndead_letter = "unpacked"\n'
    done = run(sidecar("gate", "--root", daemon.root, "--check", "--config", written(tmp_path, known + typo)))

    assert done.returncode == 0
    use, dead_letter = done.stderr.decode().splitlines()
    assert use == """wald-gate: [groups."oders/packing"] has no effect: there is no route 'oders'"""
    assert """[groups."oders/packing"]: dead_letter: there is no route 'unpacked' yet""" in dead_letter
    with Gate(daemon.root, config=known + typo) as gate:
        assert use in gate.log
        assert "has no effect" not in gate.reload(config=known)


def test_sighup_changes_limits_and_reports_what_waits_for_a_restart(daemon: Daemon) -> None:
    with Gate(daemon.root, config="") as gate:
        assert gate.post(ORDERS, b"x" * 5000).status == 200
        said = gate.reload(config='uds = "a.sock"\n[limits]\nbody_max_bytes = 1024\n')
        assert "changes of uds take effect after a restart" in said
        assert gate.post(ORDERS, b"x" * 5000).status == 413
        assert "body_max_byts" in gate.reload(config="[limits]\nbody_max_byts = 1\n")
        assert gate.post(ORDERS, b"x" * 5000).status == 413


@pytest.mark.parametrize("package", ["httptools", "uvloop"])
def test_without_the_extra_it_says_what_to_install(root: Path, daemon: Daemon, package: str) -> None:
    script = f"import sys; sys.modules[{package!r}] = None; from wald_gate.command import main; main()"
    line = [sys.executable, "-c", script, "--root", str(root), "--listen", "127.0.0.1:0"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.returncode == InvalidInput.exit_code
    assert f"wald-gate: {package}, which it needs, is not installed" in done.stderr
    assert "pip install '.[gate]'" in done.stderr


def test_it_does_not_start_where_it_would_not_be_safe(daemon: Daemon) -> None:
    cases: list[tuple[tuple[str, ...], str]] = [
        (("--listen", "0.0.0.0:0"), "without TLS and tokens"),
        (("--listen", "nowhere"), "is not HOST:PORT"),
        (("--certificate", "no.pem"), "no.pem"),
        (("--key", "a.pem"), "needs the certificate"),
    ]
    for options, said in cases:
        done = run(sidecar("gate", "--root", daemon.root, *options))

        assert done.returncode == InvalidInput.exit_code
        assert said in done.stderr.decode()


def token(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    return run(sidecar("gate", "token", *arguments))


def test_a_token_that_was_added_is_one_for_the_gate_and_without_rights_one_for_metrics(
    daemon: Daemon, tmp_path: Path
) -> None:
    path = tmp_path / "tokens"
    made = token("add", "shop", "--tokens", path, "--read", "ord*").stdout.decode().strip()
    added = token("add", "prom", "--tokens", path)

    assert made.startswith("wald_")
    assert made not in path.read_text()
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"prom may: no route, only /metrics" in added.stderr
    assert b"prom: token: no route, only /metrics" in token("list", "--tokens", path).stdout
    with Gate(daemon.root, "--tokens", path) as gate:
        assert gate.get(ORDERS, authorization=f"Bearer {made}").status == 200
        assert gate.get(ORDERS, authorization=f"Bearer {made[:-1]}").status == 401
        assert gate.get(f"{ORDERS}?access_token={made}").status == 401
        assert gate.get(ORDERS).headers["www-authenticate"].startswith("Bearer")
        authorization = f"Bearer {added.stdout.decode().strip()}"
        assert b"wald_gate_stored_records_total" in gate.get("/metrics", authorization=authorization).body
        assert gate.get(ORDERS, authorization=authorization).status == 403
        assert gate.post(ORDERS, b"1\n").status == 401
        assert made not in gate.log


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


def test_tokens_that_are_added_at_once_are_all_there_and_owner_group_and_mode_stay(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.touch()
    path.chmod(0o640)
    if os.geteuid() == 0:
        os.chown(path, 54321, 54322)
    before = path.stat()
    names = [f"c{n}" for n in range(6)]
    adding = [launched(sidecar("gate", "token", "add", name, "--tokens", path, "--admin")) for name in names]
    assert [each.wait() for each in adding] == [0] * 6
    assert {each.name for each in clients_in(path)} == set(names)
    assert os.listdir(tmp_path) == ["tokens"]

    assert token("remove", "c0", "--tokens", path).returncode == 0
    after = path.stat()
    assert (after.st_uid, after.st_gid, after.st_mode) == (before.st_uid, before.st_gid, before.st_mode)
    assert {each.name for each in clients_in(path)} == set(names[1:])


def test_what_is_refused_changes_nothing(tmp_path: Path) -> None:
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("add", "shop", "--admin"), InvalidInput.exit_code, "client 'shop' already exists"),
        (("add", "a b", "--admin"), InvalidInput.exit_code, "the name 'a b' may contain only"),
        (("add", "new", "--read", "../x"), InvalidInput.exit_code, "read must be a list of routes"),
        (("add", "new", "--read", "orders/billing"), InvalidInput.exit_code, "read must be a list of routes"),
        (("add", "new", "--work", "a/b/c"), InvalidInput.exit_code, "work must be a list of routes and groups"),
        (("add", "new", "--work", "orders/"), InvalidInput.exit_code, "work must be a list of routes and groups"),
        (("add", "new", "--admin", "--user", "a", "--certificate", "b"), InvalidInput.exit_code, "or a certificate"),
        (("remove", "nobody"), NotFound.exit_code, "there is no client 'nobody'"),
    ]
    path = tmp_path / "tokens"
    path.write_text(entry("shop", read=["orders"]))
    before = path.read_bytes()
    for arguments, code, said in cases:
        found, message, _ = refused(token(*arguments, "--tokens", path))

        assert (found, said in message) == (code, True), message
        assert path.read_bytes() == before


def test_a_line_that_could_be_misread_is_refused(tmp_path: Path) -> None:
    for line in [
        '{"name": "a", "user": "a", "reed": ["x"]}',
        '{"name": "a", "user": "a", "read": "orders"}',
        '{"name": "a", "user": "a", "admin": 1}',
        '{"name": "a", "user": "a", "certificate": "a"}',
        '{"name": "a", "sha256": "00"}',
        '{"name": "a"}',
        '["a"]',
        "not json",
        '{"name": "a", "user": "b"}\n{"name": "c", "user": "b"}',
    ]:
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
