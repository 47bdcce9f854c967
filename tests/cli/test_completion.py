"""Completion, as requested by bash, zsh and fish, and manual pages; scripts/make-manual writes both."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import programs
import pytest
from command_tree import commands
from logs import Built
from pages import ROOT
from running import output_of, run, wald

from wald.cli import cli
from wald.cli.completion import ARGUMENTS, VALUED
from wald.settings import Retention, RouteConfig, RouteLimits, reference
from wald_archive.command import command as wald_archive
from wald_drain.command import command as wald_drain

PROGRAMS = sorted(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])
ROUTES = ["access", "orders", "over-night"]
COMPLETED = {
    "wald read o": ["orders", "over-night"],
    "wald read --from e": ["earliest", "end"],
    "wald-drain feed orders --group ": ["billing", "processed"],
}


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log with three routes; orders has two groups, access has one."""
    built = Built(tmp_path_factory.mktemp("completion") / "log")
    for route in ROUTES:
        built.lines(route, [b"1"])
    output_of("cursor", "set", "orders", 1, "--root", built.root.path)
    for route, group in (("orders", "billing"), ("access", "other")):
        assert wald("cursor", "set", route, 0, "--group", group, "--root", built.root.path).returncode == 0
    for name in ("workers.work", "$(halt).work", "$(halt).cursor"):  # another user may have planted the last two
        (built.root.cursor_directory("orders") / name).touch()
    (built.root.routes / "not a route").mkdir()
    return built.root.path


@pytest.fixture(scope="module")
def share(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shell scripts, laid out as in an installed package."""
    directory = tmp_path_factory.mktemp("share")
    subprocess.run([sys.executable, ROOT / "scripts/make-manual", directory], check=True)
    return directory


def test_every_route_argument_and_every_option_with_a_value_is_listed() -> None:
    # Every argument that is a route is listed.
    short = {"wald-drain", "wald-archive"}  # shorthand for their first subcommands
    programs_ = [(cli, "wald"), (wald_drain, "wald-drain"), (wald_archive, "wald-archive")]
    found = {name: command for program, called in programs_ for name, command in commands(program, called)}
    for name, command in found.items():
        arguments = [each for each in command.params if isinstance(each, click.Argument)]
        routes = [i for i, each in enumerate(arguments) if each.name in ("route", "routes")]
        listed = ARGUMENTS.get(name, ())
        assert routes == [i for i, kind in enumerate(listed) if kind == "route"], name
        assert any(arguments[i].nargs == -1 for i in routes) == ("..." in listed), name
    assert ARGUMENTS.keys() - short <= found.keys()

    # Every option with a value is listed.
    options = [
        option for _, each in commands(cli, "wald") for option in each.params if isinstance(option, click.Option)
    ]
    assert {name for option in options if not option.is_flag for name in option.opts} - VALUED == set()


def completed(typed: str, log: Path | None) -> list[str]:
    """Return the plain words that the program prints for bash."""
    words = typed.split(" ")
    variable = f"_{words[0].upper().replace('-', '_')}_COMPLETE"
    root = {} if log is None else {"WALD_ROOT": str(log)}
    asked = {variable: "bash_complete", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)} | root
    done = run([sys.executable, "-m", words[0].replace("-", "_")], env=asked)
    assert (done.returncode, done.stderr) == (0, b"")
    return [line.removeprefix("plain,") for line in done.stdout.decode().splitlines()]


@pytest.mark.parametrize(
    ("typed", "expected"),
    [
        *COMPLETED.items(),
        ("wald append ", ROUTES),
        ("wald cursor get access --group ", ["other"]),
        ("wald hold access ", ROUTES),
        ("wald drain feed acc", ["access"]),
        ("wald drain fe", ["feed"]),
        ("wald-archive access o", ["orders", "over-night"]),
        ("wald-archive restore /a ac", ["access"]),
        ("wald read --group ", ["billing", "other", "processed"]),
        ("wald read --group=b", ["--group=billing"]),
        ("wald read --limit 5 ov", ["over-night"]),
        ("wald cursor set orders y", ["yesterday"]),
        ("wald read orders --since t", ["today"]),
        ("wald read orders --fo", ["--follow", "--format"]),
        ("wald cursor l", ["list"]),
        ("wald group show o", ["orders", "over-night"]),
        ("wald group pending orders ", ["workers"]),
    ],
)
def test_what_may_follow_is_read_from_the_log(log: Path, typed: str, expected: list[str]) -> None:
    assert completed(typed, log) == expected


def test_a_typed_root_is_used_and_no_command_imported(log: Path) -> None:
    # The root may be one that was typed.
    assert completed(f"wald --root {log} read acc", None) == ["access"]
    assert completed(f"wald read --root={log} acc", None) == ["access"]
    assert completed("wald read acc", None) == []
    assert completed("wald --root /nowhere read acc", None) == []

    # No command is imported to complete a route: the import would cause a noticeable delay.
    script = "import sys; from wald.cli import main\ntry: main()\nfinally: print(*sys.modules)"
    asked = {"_WALD_COMPLETE": "bash_complete", "COMP_WORDS": "wald read ", "COMP_CWORD": "2", "WALD_ROOT": str(log)}
    line = [sys.executable, "-c", script]
    loaded = subprocess.run(line, env=os.environ | asked, capture_output=True, text=True, check=True).stdout
    assert "plain,orders" in loaded
    assert [name for name in loaded.split() if name.startswith(("wald.segments", "wald.cli.read", "zstandard"))] == []


# Each prints the words that its shell would offer; of zsh, whose widgets need a terminal, the function is called.
SHELLS = {
    "bash": (
        "bash-completion/completions/{program}",
        ["-c"],
        """source {script}; COMP_WORDS=({words})
        COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); {function} {program}; printf '%s\\n' "${{COMPREPLY[@]}}" """,
    ),
    "fish": (
        "fish/vendor_completions.d/{program}.fish",
        ["--no-config", "-c"],
        "source {script}; complete -C '{typed}'",
    ),
    "zsh": (
        "zsh/vendor-completions/_{program}",
        ["-f", "-c"],
        """compdef() {{ }}
        _describe() {{ shift 2; print -rl -- "${{(@P)1}}" }}
        compadd() {{ shift $(( ${{@[(i)-a]}} )); print -rl -- "${{(@P)1}}" }}
        source {script}; words=({words}); CURRENT=${{#words}}; {function}""",
    ),
}


@pytest.mark.parametrize("typed", COMPLETED)
@pytest.mark.parametrize("shell", SHELLS)
def test_a_shell_completes(share: Path, log: Path, shell: str, typed: str) -> None:
    path, options, asked = SHELLS[shell]
    program = typed.partition(" ")[0]
    names = {"program": program, "function": f"_{program.replace('-', '_')}_completion", "typed": typed}
    names["words"] = " ".join(f"'{word}'" for word in typed.split(" "))
    script = asked.format(script=share / path.format(program=program), **names)

    assert in_shell([programs.program(shell), *options, script], log) == COMPLETED[typed]


def in_shell(line: list[str], log: Path) -> list[str]:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = os.environ | {"WALD_ROOT": str(log), "PATH": path}
    done = subprocess.run(line, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def shown(page: Path) -> str:
    """Return a page as ``man`` shows it, in one line."""
    man = [programs.program("man"), "--warnings", "-l", str(page)]
    done = subprocess.run(man, env=os.environ | {"MANWIDTH": "4000"}, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return " ".join(done.stdout.split())


def test_manual_pages_have_every_command_option_and_setting(share: Path) -> None:
    # A program has a page with every command and option.
    for program in PROGRAMS:
        text = shown(share / f"man/man1/{program}.1")
        section = (ROOT / "docs/cli.md").read_text().partition(f"\n## {program}\n")[2].partition("\n## ")[0]
        options = re.findall(r"^\| `(-[^`]+)`", section.replace("\\|", "|"), re.MULTILINE)
        named = re.findall(r"^#+ (.+)$", section, re.MULTILINE)
        assert options
        assert [each for each in options + named if each not in text] == []

    # The page of the settings has all of them.
    text = shown(share / "man/man5/wald.toml.5")
    settings = reference() + reference(Retention) + reference(RouteConfig) + reference(RouteLimits)
    assert [each.name for each in settings if f" {each.name} = {each.default}".rstrip(" =") not in text] == []
