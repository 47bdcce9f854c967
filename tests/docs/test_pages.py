"""The pages as a whole, and statements of the reference that a program can check."""

import json
import re
import struct
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

from crc32c import crc32c
from pages import PAGES, ROOT, VAGUE, anchors, blocks, links, rows, section, without_blocks
from running import Daemon, output_of
from sample_segments import SALT

from wald import errors
from wald.format.ledger_lines import decode_ledger
from wald.format.protocol import Code

README_LINES_MAX = 200
DOCUMENTS = [*PAGES, "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"]
GENERATED = re.compile(r"<!-- begin .*?<!-- end -->", re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= README_LINES_MAX


def test_every_link_leads_to_a_file_and_a_heading() -> None:
    """`make docs` checks the links of the site; this test checks the files, some of which are not in the site."""
    for page in PAGES:
        broken = []
        for link in links(page):
            path, _, anchor = link.partition("#")
            target = str(PurePosixPath(page).parent / path) if path else page
            target = str((ROOT / target).resolve().relative_to(ROOT))
            if not (ROOT / target).exists() or (anchor and anchor not in anchors(target)):
                broken.append(link)

        assert broken == [], page


def test_the_readme_links_to_every_page() -> None:
    """Exceptions are the Spark pages and the front page of the site, which other pages link to."""
    pages = {page for page in PAGES if page.startswith("docs/") and "/spark/" not in page} - {"docs/index.md"}

    linked = {link.partition("#")[0] for link in links("README.md") if not link.endswith(".png")}
    assert linked - {"docs/spark/index.md"} == pages


def test_the_language_is_plain() -> None:
    """Generated parts are exempt: their wording comes from the code."""
    for document in DOCUMENTS:
        assert VAGUE.findall(GENERATED.sub("", (ROOT / document).read_text())) == [], document


def test_every_block_says_what_it_is() -> None:
    """Only marked blocks are run, and a misspelt mark does not exclude a block."""
    modes = {f"{language}{mode}" for language in ("sh", "python") for mode in ("", " spark", " not-run")}
    known = modes | {"console", "toml", "toml gate", "text", "{toctree}"}
    for page in PAGES:
        opened = re.findall(r"^ *```(\S.*)$", PAGES[page], re.MULTILINE)

        assert set(opened) <= known, page


def test_generated_parts_are_up_to_date() -> None:
    """Commands, settings and bytes match the code; `scripts/make-docs` regenerates them."""
    line = [sys.executable, str(ROOT / "scripts/make-docs"), "--check"]
    done = subprocess.run(line, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def layout(heading: str) -> dict[str, bytes]:
    """Return the bytes of each field in the table below a heading of the format page."""
    return {row[2]: bytes.fromhex(row[1].strip("`")) for row in rows("docs/format.md", heading)}


def test_checksums_cover_what_the_page_says() -> None:
    segment, batch = layout("### The segment header"), layout("### A batch")
    opened, whole = (
        b"".join(segment.values()),
        b"".join(bytes.fromhex(row[1].strip("`")) for row in rows("docs/format.md", "### A batch")),
    )

    assert struct.unpack("<I", segment["checksum"])[0] == crc32c(opened[12:64])
    assert struct.unpack("<I", segment["salt"])[0] == SALT
    assert struct.unpack("<I", batch["header checksum"])[0] == crc32c(whole[8:64], SALT)
    assert struct.unpack("<I", batch["body checksum"])[0] == crc32c(whole[64:96])
    assert struct.unpack("<I", batch["trailer checksum"])[0] == crc32c(whole[96:100], SALT)
    assert struct.unpack("<I", batch["length"])[0] == len(whole)


def test_the_ledgers_it_shows_are_whole() -> None:
    """Each example starts a ledger, and its lines form a chain."""
    page = (ROOT / "docs/format.md").read_text()
    ledgers = re.findall(r"```text\n(\{\"event\".*?\n)```", page, re.DOTALL)
    events = []
    for ledger in ledgers:
        decoded = decode_ledger(ledger.encode())
        assert (decoded.broken_lines, decoded.complete_bytes) == ([], len(ledger.encode()))
        events += [entry["event"] for entry in decoded.entries]

    assert events == ["cut", "sealed", "reclaimed", "begun", "archived", "finished"]


def test_every_file_it_names_is_there() -> None:
    for page in PAGES:
        named = set(re.findall(r"`((?:tests|wald|scripts|sidecars|docs)/[\w/.-]+|[A-Z]+\.md)`", without_blocks(page)))

        assert [path for path in named if not (ROOT / path).exists()] == [], page


def test_every_make_target_it_names_is_there() -> None:
    targets = set(re.findall(r"^([a-z0-9.-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for page in PAGES:
        named = re.findall(r"^make ([a-z0-9.-]+)|`make ([a-z0-9.-]+)(?:`| [A-Z]+=)", PAGES[page], re.MULTILINE)

        assert {first or second for first, second in named} <= targets, page


OVERVIEW = rows("docs/cli.md", "# Commands")
PROGRAMS = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"])


def words_of(usage: str) -> list[str]:
    """Return the program and the commands at the start of a usage."""
    return re.findall(r"[a-z-]+", re.split(r" [A-Z\[]| --", usage.strip("`"))[0])


def options(text: str, *, before: str = "") -> set[str]:
    return set(re.findall(before + r"(--[a-z-]+)", text, re.MULTILINE))


def test_every_program_that_is_installed_is_in_the_overview() -> None:
    assert {words_of(row[0])[0] for row in OVERVIEW} == PROGRAMS


def test_every_command_of_wald_is_in_the_overview() -> None:
    shown = output_of("--help").decode().partition("Write and read:")[2]
    listed = {name for names in re.findall(r"^  ([a-z, ]+)  ", shown, re.MULTILINE) for name in names.split(", ")}
    listed = {name.strip() for name in listed} - {name.removeprefix("wald-") for name in PROGRAMS} - {""}

    assert {words_of(row[0])[1] for row in OVERVIEW if words_of(row[0])[0] == "wald"} == listed


def test_every_command_that_has_a_section_is_in_the_overview() -> None:
    """The sections are generated from click; a command with subcommands is only a group."""
    headings = re.findall(r"^##+ (wald.*)$", section("docs/cli.md", "## Who may do what"), re.MULTILINE)
    commands = [each for each in headings if not any(other.startswith(f"{each} ") for other in headings)]

    assert sorted(" ".join(words_of(row[0])) for row in OVERVIEW) == sorted(commands)


def lines(text: str) -> list[str]:
    """Return the command lines of a block, with continuation lines joined and without comments and user prefix."""
    return [re.sub(r"\s+#.*|runuser -u wald -- ", "", line) for line in text.replace("\\\n", " ").splitlines()]


def test_every_option_it_uses_exists() -> None:
    """This includes blocks that are not run because they need a cluster, and commands within a sentence."""
    known = {program: options(section("docs/cli.md", f"## {program}").split("\n## ")[0]) for program in PROGRAMS}
    for page in PAGES:
        given = [line for block in blocks(page) if block.language in ("sh", "console") for line in lines(block.text)]
        given += re.findall(r"`(wald[ -][^`]*)`", without_blocks(page).replace("\n", " "))
        unknown = []
        for line in given:
            for call in re.split(r"[|;&]+", line):
                found = re.search(r"(?<![\w/.-])(wald(?:-[a-z]+)?)(?= (?!--? ))(.*)", call)
                if found is not None and found[1] in known:
                    ours = re.split(r" -- ", found[2])[0] if found[1] == "wald-drain" else found[2]
                    others = options(ours, before="(?<= )") - known[found[1]]
                    unknown += [(line, option) for option in others - {"--root", "--help", "--version"}]

        assert unknown == [], page


def test_exit_codes_are_those_of_the_errors() -> None:
    named = {int(code): name for code, name, _ in rows("docs/cli.md", "## Exit codes") if name}
    everywhere: list[type[errors.WaldError]] = [errors.WaldError, *errors.WaldError.__subclasses__()]
    classes = [each for each in everywhere if each.__module__ == errors.__name__]  # other errors do not exit a command

    assert named == {each.exit_code: each.__name__ for each in classes}


def test_every_exit_code_has_advice() -> None:
    codes = {int(code) for code, _, _ in rows("docs/cli.md", "## Exit codes")} - {0}
    headings = re.findall(r"^### (\d+)(?: and (\d+))?", PAGES["docs/troubleshooting.md"], re.MULTILINE)

    assert {int(code) for heading in headings for code in heading if code} == codes


def test_error_codes_are_those_of_the_protocol() -> None:
    assert sorted(row[0].strip("`") for row in rows("docs/protocol.md", "## Errors")) == sorted(Code)


def test_stat_answers_what_it_says(tmp_path: Path) -> None:
    with Daemon(tmp_path / "log") as daemon:
        answered = json.loads(daemon.ask("STAT").removeprefix("OK "))
    listed = {name for row in rows("docs/monitoring.md", "## STAT") for name in re.findall(r"`(\w+)`", row[0])}

    assert listed == answered.keys()


def test_every_promise_names_what_holds_it() -> None:
    promises = rows("docs/guarantees.md", "## Promises")

    assert [int(row[0]) for row in promises] == list(range(1, 18))
    assert [row[0] for row in promises if "`tests/" not in row[2]] == []


def test_the_readme_promises_nothing_else() -> None:
    promises = {row[1] for row in rows("docs/guarantees.md", "## Promises")}
    short = re.findall(
        r"^\d+\. (.*?\.)$", section("README.md", "## Promises").split("\n## ")[0].replace("\n   ", " "), re.MULTILINE
    )

    assert short
    assert [promise for promise in short if not any(each.startswith(promise.rstrip(".")) for each in promises)] == []


def test_the_readme_is_as_fast_as_the_benchmarks() -> None:
    """Every number of the README table is in the tables of the page."""
    numbers = re.findall(r"\d[\d.,]*\d", " ".join(" ".join(row[1:]) for row in rows("README.md", "## How fast")))

    assert len(numbers) > 8
    assert [number for number in numbers if f" {number} " not in PAGES["docs/benchmarks.md"]] == []
