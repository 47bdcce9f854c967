"""Creation of a log on request, and a daemon that must not create one and rejects any other directory."""

import os
from pathlib import Path

import pytest
from running import Daemon, command, output_of, refused, run

import wald
from wald.errors import NotFound

REFUSE = {"WALD_ON_MISSING_ROOT": "refuse"}


def test_a_log_that_was_made_is_run_on(tmp_path: Path) -> None:
    root = tmp_path / "new" / "log"
    assert output_of("init", "--root", root) == b""
    made = (root / "log.json").read_bytes()
    with Daemon(root, env=REFUSE) as daemon:
        assert daemon.stop() == 0
    assert output_of("init", "--root", root) == b""
    assert (root / "log.json").read_bytes() == made
    assert list(wald.open(root).records()) == []


@pytest.mark.parametrize("there", [True, False], ids=["empty", "missing"])
def test_a_mount_point_without_its_file_system_does_not_become_a_log(tmp_path: Path, there: bool) -> None:
    root = tmp_path / "mnt"
    if there:
        root.mkdir()
    code, message, hint = refused(run(command("run", "--root", root), env=REFUSE))
    assert code == NotFound.exit_code
    assert message.startswith(f"{root}: there is no log here")
    assert f"to create a log: wald --root {root} init" in hint
    assert (os.listdir(root) if there else root.exists()) in ([], False)


def test_a_log_on_which_no_daemon_has_run_says_so(root: Path) -> None:
    output_of("init", "--root", root)
    done = run(command("route", "list", "--root", root))

    assert done.stderr.decode() == f"no daemon runs: this log has never had one\n  hint: wald --root {root} run\n"
