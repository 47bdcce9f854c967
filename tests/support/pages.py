"""The pages that a reader finds, as tests read them: tables, blocks of code, headings, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_PATHS = [
    *(ROOT / folder / "README.md" for folder in (".", "examples", "sidecars")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in _PATHS}
# A program, a process or a user has a name, and what is reported is not "told".
VAGUE = re.compile(r"\b(?:any|every|no|some)body\b|\bwho(?:ever|m)\b|\btold\b|\blest\b", re.IGNORECASE)
_BLOCK = re.compile(r"^( *)```([^\n]*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_SECTION = re.compile(r"^## (.*)$", re.MULTILINE)
_PUNCTUATION = re.compile(r"[^\w\- ]")


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code.

    Attributes:
        language: what stands behind the fence: sh, console, python, toml, text.
        mode: nothing: tests/docs executes it; "spark": a test that starts Spark does; "not-run": only its words are
            checked, as it needs what no machine of ours has; of toml, "gate": settings of the gate.
        line: of the page, on which its first line stands.
        heading: of the section (`##`) that it is in; "" above the first.
    """

    language: str
    mode: str
    text: str
    line: int
    heading: str


def blocks(page: str) -> list[Block]:
    """Every block of a page, in order."""
    text = PAGES[page]
    found = []
    for match in _BLOCK.finditer(text):
        language, _, mode = match[2].partition(" ")
        body = re.sub(rf"^{match[1]}", "", match[3], flags=re.MULTILINE)
        heading = ["", *_SECTION.findall(_BLOCK.sub("", text[: match.start()]))][-1]
        found.append(Block(language, mode, body, text.count("\n", 0, match.start()) + 2, heading))
    return found


def headings(page: str) -> list[str]:
    """Those of the sections of a page (`##`), in order."""
    return _SECTION.findall(without_blocks(page))


def without_blocks(page: str) -> str:
    """What is written in a page outside its blocks of code."""
    return _BLOCK.sub("", PAGES[page])


def section(page: str, heading: str) -> str:
    """What follows ``heading``, to the end of the page."""
    return f"\n{PAGES[page]}".split(f"\n{heading}\n", 1)[1]


def rows(page: str, heading: str) -> list[list[str]]:
    """The cells of the first table below ``heading``, without its own heading."""
    found = re.search(r"(?:^\|.*\n)+", section(page, heading), re.MULTILINE)
    assert found is not None
    lines = found[0].splitlines()[2:]
    return [[cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def anchors(page: str) -> set[str]:
    """What a link to a heading of the page ends in, as hosts of repositories and MyST make it."""
    headings = re.findall(r"^#+ (.*)$", without_blocks(page), re.MULTILINE)
    return {_PUNCTUATION.sub("", heading.lower()).replace(" ", "-") for heading in headings}


def links(page: str) -> list[str]:
    """Where the links of a page lead."""
    return re.findall(r"\]\(([^)\s]+)\)", without_blocks(page))
