"""Consumers: segments that all groups have read are deleted, and their records restored from the archive."""

from __future__ import annotations

import hashlib
import json
import time
from pathlib import Path

from demonstration.pipeline import spark_runs
from demonstration.showing import expect, megabytes, paint, sealed_segments, show, since, title, wald_command
from demonstration.text import ROUTES, Text


def consume(root: Path, cold: Path, texts: list[Text]) -> None:
    title(
        "Consumers",
        "a segment is deleted once every group has read it; until then, explain names the groups that pin it",
    )
    show(root, "explain", lines_max=40)
    by_fifo, by_pipe, by_socket = ROUTES
    show(root, by_fifo, "--exit-at-end", "--batch-records", "100000", "--", "wc", "-l", program="wald-drain")
    wald_command(root, "cursor", "set", by_pipe, "0", "--rewind")
    began = time.monotonic()
    read = wald_command(root, "read", by_pipe, "--commit", binary=True)
    expect(len(read) == texts[1].length, f"{len(read):,} bytes were read, {texts[1].length:,} were fed")
    print(paint(f"  $ wald read {by_pipe} --commit > /dev/null", "36"))
    print(f"    {megabytes(len(read))} in {since(began)}; the cursor is where reading ended")
    engine = "spark" if spark_runs() else "local"
    packing = ("--dest", str(cold), "--bytes-per-bundle", "8MiB", "--engine", engine)
    show(root, by_socket, *packing, program="wald-archive")
    show(root, "verify", str(cold), "--root", str(root), program="wald-archive")


def let_go(root: Path, cold: Path, texts: list[Text]) -> None:
    title("Deletion", "the ledger records each deletion, and the cursors that allowed it, before it happens")
    show(root, "--grace", "0", program="wald-reclaim", lines_max=5)
    expect(not sealed_segments(root), "every group has read everything, but segments remain")
    restored = hashlib.sha256(
        wald_command(root, "restore", str(cold), "by-socket", program="wald-archive", binary=True)
    )
    expect(restored.hexdigest() == texts[2].sha256, "the restored bytes differ from the input")
    print(paint("  $ wald-archive restore cold by-socket | sha256sum", "36"))
    print(f"    {restored.hexdigest()[:16]}…, the digest of the input; the log itself is empty by now:")
    bundle = next(iter(json.loads(next(cold.glob("*/*/manifest.json")).read_bytes())["bundles"]))
    show(root, "where", str(bundle["first"]))
    show(root, "explain")
    show(root, "verify", lines_max=4)
