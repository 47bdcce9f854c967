"""Help of all programs, programs run by ``wald NAME``, and the message for removed commands."""

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import click
import pytest
from pages import ROOT
from running import output_of, refusal_of, wald

from wald.cli import cli
from wald.cli.command import HELP_WIDTH

LINES_MAX = 50
SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def contexts(command: click.Command, name: str, parent: click.Context | None = None) -> Iterator[click.Context]:
    """Yield the context of a command and of each one below it."""
    context = click.Context(command, info_name=name, parent=parent, terminal_width=HELP_WIDTH)
    yield context
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            inner = command.get_command(context, each)
            assert inner is not None
            yield from contexts(inner, each, context)


PROGRAMS = {
    name: cli if name == "wald" else import_module(target.partition(":")[0]).command for name, target in SCRIPTS.items()
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_help_is_short_and_has_two_examples(program: str) -> None:
    for context in contexts(PROGRAMS[program], program):
        command = context.command
        shown = command.get_help(context).splitlines()
        assert len(shown) <= LINES_MAX, context.command_path
        assert max(map(len, shown)) <= HELP_WIDTH, context.command_path
        if isinstance(command, click.Group):
            continue
        lines = (command.epilog or "").splitlines()[2:]
        assert len(lines) == 2, context.command_path
        known = {name for each in command.params for name in each.opts} | {"--root"}
        for line in lines:
            assert program.partition("-")[0] in line, context.command_path
            used = [word.partition("=")[0] for word in line.partition(" -- ")[0].split() if word.startswith("--")]
            assert set(used) <= known, line


def test_help_all_shows_every_option_and_setting() -> None:
    assert b"--jobs" not in output_of("read", "--help")
    assert b"--jobs" in output_of("read", "--help-all")
    assert b"segment_max_bytes" not in output_of("run", "--help")
    assert b"segment_max_bytes" in output_of("run", "--help-all")


def test_a_program_runs_as_a_command_with_the_root_of_wald(tmp_path: Path) -> None:
    output_of("init", "--root", tmp_path / "log")

    assert output_of("--root", tmp_path / "log", "reclaim", "--dry-run") == output_of(
        "reclaim", "--dry-run", "--root", tmp_path / "log"
    )
    assert output_of("gate", "token", "--help").startswith(b"Usage: wald-gate token ")
    assert wald("drain", "none", "--root", tmp_path / "log", "--", "true").returncode == 3


def test_a_missing_package_is_reported_with_its_extra() -> None:
    script = "import sys; sys.modules['wald_gate.command'] = None; from wald.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", script, "gate"], capture_output=True, text=True, check=False)

    assert done.returncode == 2
    assert done.stderr.endswith("is not installed\n  hint: in a clone of wald: pip install '.[gate]'\n")


def test_a_removed_command_names_its_successor() -> None:
    for removed, instead in (
        *(("routes", "wald route list"), ("latency", "wald status --latency"), ("file", "wald inspect FILE")),
        *(("grep", "wald read --grep PATTERN --prefix"), ("dump", "wald inspect --content FILE")),
    ):
        code, message, hint = refusal_of(removed, "a")
        assert (code, hint, f"{removed} was removed" in message) == (2, instead, True), message
