"""Manual pages, in groff's macros for them: one for each program, and one for the settings."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator

import click

import wald
from documents.commands import below, described, example_lines, programs, usage
from wald.cli import command
from wald.settings import Retention, RouteConfig, RouteLimits, Setting, reference

SETTINGS = "wald.toml"
FILES = [
    ("/etc/wald/wald.toml", "The settings of the system's log; see wald.toml(5)."),
    ("/var/lib/wald", "The system's log."),
    ("/usr/share/doc/wald", "The whole documentation."),
]


def manual() -> dict[str, str]:
    """The text of each page, by the name of its file."""
    pages = {f"{context.info_name}.1": program_page(context) for context in programs()}
    pages[f"{SETTINGS}.5"] = settings_page()
    return {file: text + see_also(other for other in pages if other != file) for file, text in pages.items()}


def program_page(context: click.Context) -> str:
    """Return the page of a program: description, options, commands."""
    name, command = str(context.info_name), context.command
    summary, _, _ = " ".join((command.help or "").split()).partition(". ")
    commands = "".join(command_part(inner) for inner in below(context))
    return (
        heading(name, 1, summary.rstrip("."))
        + section("SYNOPSIS", synopsis(context))
        + section("DESCRIPTION", prose(command.help or ""))
        + section("OPTIONS", entries(options(context)))
        + (section("COMMANDS", commands) if commands else "")
        + (section("EXAMPLES", paragraph(f"\b\n{shown}")) if (shown := example_lines(command)) else "")
        + section("EXIT STATUS", entries(exit_codes()))
        + section("ENVIRONMENT", entries([("WALD_ROOT", "The log, where --root is not given.")]))
        + section("FILES", entries(FILES))
    )


def settings_page() -> str:
    """The page of the file that ``wald run --config`` reads."""
    text = (
        "A file of settings in TOML. Each may also be a variable of the environment, WALD_ and its name in capitals. "
        "SIGHUP makes the daemon read the file again."
    )
    example = paragraph("A route with a FIFO:") + paragraph("\b\n[routes.access]\nfifo = true")
    return (
        heading(SETTINGS, 5, "settings of the daemon of wald")
        + section("DESCRIPTION", escaped(text))
        + section("SETTINGS", settings(reference()))
        + section("SETTINGS OF [retention]", settings(reference(Retention)))
        + section("SETTINGS OF [routes.NAME]", settings(reference(RouteConfig)))
        + section("LIMITS IN [routes.NAME], OR IN [retention] FOR ALL", settings(reference(RouteLimits)))
        + section("EXAMPLES", example)
    )


def settings(rows: list[Setting]) -> str:
    """Settings of one table, each with its default, meaning and bounds."""
    terms = [f"{each.name} = {each.default}".removesuffix(" = ") for each in rows]
    return entries(zip(terms, [f"{each.meaning} ({each.bounds})." for each in rows], strict=True))


def heading(name: str, number: int, summary: str) -> str:
    """The title of a page and its line in the index of manuals."""
    title = f'.TH {escaped(name.upper())} {number} "" "wald {wald.__version__}"\n'
    return title + section("NAME", f"{escaped(name)} \\- {escaped(summary[0].lower() + summary[1:])}")


def see_also(files: Iterable[str]) -> str:
    """The other pages."""
    named = (file.rpartition(".") for file in files)
    return section("SEE ALSO", ", ".join(f"\\fB{escaped(name)}\\fR({number})" for name, _, number in named))


def section(title: str, body: str) -> str:
    return f".SH {title}\n{body.rstrip()}\n"


def synopsis(context: click.Context) -> str:
    """Return the synopsis of a command, with its words in bold and placeholders in plain type."""
    arguments = usage(context).removeprefix(context.command_path).strip()
    return f"\\fB{escaped(context.command_path)}\\fR {escaped(arguments)}"


def command_part(context: click.Context) -> str:
    """A command of a program, and those below it."""
    body = prose(context.command.help or "") + entries(options(context))
    if shown := example_lines(context.command):
        body += paragraph("Examples:") + paragraph(f"\b\n{shown}")
    return f".SS {synopsis(context)}\n{body}" + "".join(command_part(inner) for inner in below(context))


def options(context: click.Context) -> list[tuple[str, str]]:
    """Every option; of those that all commands have, once in a page is enough."""
    every = [("--root DIR", "The directory of the log."), ("--version, --help", "Print this, and exit.")]
    return described(context) + (every if context.parent is None else [])


def exit_codes() -> Iterator[tuple[str, str]]:
    """Each exit code and its meaning, as the programs' own module lists them."""
    found = re.search(r"Exit codes: (.*)\.$", command.__doc__ or "", re.DOTALL)
    assert found is not None
    for code in " ".join(found[1].split()).split("; "):
        number, _, meaning = code.partition(" ")
        yield number, f"{meaning}."


def entries(pairs: Iterable[tuple[str, str]]) -> str:
    """Return a list of terms, each with its meaning below it."""
    return "".join(f".TP\n\\fB{escaped(term)}\\fR\n{escaped(meaning)}\n" for term, meaning in pairs)


def prose(help_text: str) -> str:
    """Return the help text of a command; text that click must not wrap stays verbatim."""
    paragraphs = textwrap.dedent(help_text).strip().split("\n\n")
    return "".join(paragraph(part) for part in paragraphs if part)


def paragraph(text: str) -> str:
    if text.startswith("\b"):
        lines = (escaped(line) for line in text.splitlines()[1:])
        return ".PP\n.nf\n" + "\n".join(lines) + "\n.fi\n"
    return f".PP\n{escaped(' '.join(text.split()))}\n"


def escaped(text: str) -> str:
    """Escape text for groff; text in backticks becomes bold."""
    text = text.replace("\\", "\\e").replace("-", "\\-")
    return re.sub(r"`([^`]+)`", r"\\fB\1\\fR", re.sub(r"^([.'])", r"\\&\1", text, flags=re.MULTILINE))
