"""Everything back, byte for byte; any record asked about; and what stock tools make of the files."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import time
from pathlib import Path

import wald
from demonstration.showing import (
    ENVIRONMENT,
    PATIENCE_SECONDS,
    WALD,
    expect,
    megabytes,
    paint,
    rate,
    sealed_segments,
    show,
    title,
)
from demonstration.text import ROUTES, Text


def show_state(root: Path) -> None:
    title("State", "the head is the last durable record; a route's lag counts records not processed yet")
    show(root, "head")
    show(root, "route", "list")


def read_back(root: Path, texts: list[Text]) -> None:
    title("Everything back", "`wald read ROUTE`, through sealed, cut and active segments, compared with the input")
    for route, text in zip(ROUTES, texts, strict=True):
        began = time.monotonic()
        command = [*WALD, "--root", root, "read", route]
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=ENVIRONMENT) as reading:
            assert reading.stdout is not None
            digest, length = hashlib.sha256(), 0
            while chunk := reading.stdout.read(1 << 20):
                digest.update(chunk)
                length += len(chunk)
        seconds = time.monotonic() - began
        expect(reading.returncode == 0, f"wald read {route} ended with exit code {reading.returncode}")
        same = length == text.length and digest.hexdigest() == text.sha256
        verdict = paint("same", "32") if same else paint("DIFFERENT", "1;31")
        print(f"  {route:10} {length:>12,} bytes  sha256 {digest.hexdigest()[:16]}…  {verdict}  in {seconds:.2f} s")
        expect(same, f"{route}: {text.length:,} bytes with sha256 {text.sha256} were fed")


def seal(root: Path) -> None:
    title("Cut and seal", "the active segment is cut on command; sealing compresses it and reads it back")
    show(root, "cut")
    deadline = time.monotonic() + PATIENCE_SECONDS
    while len(list((root / "segments").glob("*.wal"))) > 1:
        expect(time.monotonic() < deadline, "the segments are not being sealed")
        time.sleep(0.02)
    for path in sorted((root / "segments").glob("*.wal*"))[:3]:
        print(f"  {path.name}  {megabytes(path.stat().st_size)}")
    print(f"  … {len(sealed_segments(root))} sealed segments, and the active one")


def ask(root: Path) -> None:
    title("Ask about any record", "every sequence has an answer; verify reads everything and changes nothing")
    head = wald.open(root).head()
    assert head is not None
    for sequence in (1, head.sequence // 2):
        show(root, "where", str(sequence))
    show(root, "where", str(head.sequence + 1), code=3)
    show(root, "cursor", "set", "by-pipe", str(head.sequence // 3))
    show(root, "read", "by-pipe", "--from", "cursor", "--limit", "1", "--format", "json")
    show(root, "verify")


def check_with_stock_tools(root: Path) -> None:
    title("Without wald", "a sealed segment is an ordinary .zst file; the ledger has the sha256 of its contents")
    if shutil.which("zstd") is None:
        print("  skipped, because zstd is not installed")
        return
    entries = map(json.loads, (root / "ledger" / "segments.jsonl").read_bytes().splitlines())
    expected = {entry["base"]: entry["sha256"] for entry in entries if entry["event"] == "sealed"}
    segments = sealed_segments(root)
    subprocess.run(["zstd", "-t", "-q", *segments], check=True)
    print(f"  $ zstd -t segments/*.zst\n    {len(segments)} files, all intact")
    for path in segments:
        digest = hashlib.sha256(subprocess.run(["zstd", "-dcq", path], check=True, stdout=subprocess.PIPE).stdout)
        base = int(path.name.partition(".")[0])
        expect(digest.hexdigest() == expected.get(base), f"{path}: its digest differs from that in the ledger")
    print(f"  $ zstd -dc SEGMENT | sha256sum\n    {len(segments)} digests, each the one in ledger/segments.jsonl")


def sizes(root: Path, texts: list[Text], fed_in: float) -> None:
    title("Sizes")
    text = sum(each.length for each in texts)
    entries = [json.loads(line) for line in (root / "ledger" / "segments.jsonl").read_bytes().splitlines()]
    raw = sum(entry["raw_bytes"] for entry in entries if entry["event"] == "sealed")
    compressed = sum(entry["bytes"] for entry in entries if entry["event"] == "sealed")
    print(f"  text            {megabytes(text):>9}")
    print(f"  raw segments    {megabytes(raw):>9}   {(raw - text) / text:+.2%}: headers, checksums, padding")
    print(f"  sealed          {megabytes(compressed):>9}   {raw / compressed:.2f} to 1, index included")
    print(f"  producer to disk {rate(text, fed_in):>8}   with a sync before every acknowledgement, while sealing")
