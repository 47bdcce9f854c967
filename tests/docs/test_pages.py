"""The pages as a whole: no broken links, current generated parts, a short README."""

from __future__ import annotations

import re
import struct
import subprocess
import sys
from pathlib import PurePosixPath

from crc32c import crc32c
from pages import PAGES, ROOT, VAGUE, anchors, links, rows, without_blocks
from sample_segments import SALT

from wald.format.ledger_lines import decode_ledger

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
