"""Store, follow and work on records over HTTP, with requests; each goes on when the gate is restarted.

usage: gate.py store ROUTE | follow ROUTE FILE | work ROUTE GROUP

store takes lines from stdin. follow prints records, and keeps in FILE which was the last. work prints records that it
gets as one worker of a group, and acknowledges them; curl -X PUT --json '{"sequence": "earliest"}' with the path
/v1/routes/ROUTE/cursors/GROUP makes the group. WALD_GATE is the address, WALD_TOKEN a token if there are any.
"""

from __future__ import annotations

import base64
import itertools
import json
import os
import random
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import requests

GATE = os.environ.get("WALD_GATE", "http://127.0.0.1:7700")
PASSES = {408, 409, 423, 429, 503}  # 409: the same request is still under way; 423: another gate has the group
session = requests.Session()
if "WALD_TOKEN" in os.environ:
    session.headers["Authorization"] = f"Bearer {os.environ['WALD_TOKEN']}"


def ask(method: str, path: str, **options: Any) -> requests.Response:
    """Ask until there is an answer; what does not pass ends the program."""
    options.setdefault("timeout", (5, 60))  # seconds to connect, and without a byte
    pauses = itertools.chain((0.1, 0.2, 0.5, 1, 2), itertools.repeat(5))
    while True:
        pause = next(pauses)
        try:
            answer = session.request(method, GATE + path, **options)
            if answer.ok:
                return answer
            if answer.status_code not in PASSES or "Retry-After" not in answer.headers:
                sys.exit(f"{answer.status_code}: {answer.text}")
            pause = float(answer.headers["Retry-After"])
        except requests.exceptions.SSLError as error:
            sys.exit(f"{error}; REQUESTS_CA_BUNDLE names a certificate of one's own")
        except (requests.ConnectionError, requests.Timeout) as error:
            print(f"trying again: {error}", file=sys.stderr)
        time.sleep(pause * random.uniform(1, 1.5))  # noqa: S311 - so that not all come at once


def store(route: str) -> None:
    """A hundred lines in a request; its key makes it safe to send it again."""
    while lines := list(itertools.islice(sys.stdin.buffer, 100)):
        headers = {"Content-Type": "text/plain", "Idempotency-Key": str(uuid.uuid4())}
        stored = ask("POST", f"/v1/routes/{route}/records", data=b"".join(lines), headers=headers).json()
        print(f"stored {stored['first']} to {stored['last']}", flush=True)


def follow(route: str, file: Path) -> None:
    """Server-Sent Events; the id of the last one says where to go on."""
    headers = {"Accept": "text/event-stream"}
    while True:
        if file.exists():
            headers["Last-Event-ID"] = file.read_text()
        try:
            with ask("GET", f"/v1/routes/{route}/records", headers=headers, stream=True) as events:
                for line in events.iter_lines():
                    if line.startswith(b"data: "):
                        record = json.loads(line.removeprefix(b"data: "))
                        show(record)
                        keep(file, record["sequence"])
        except (requests.ConnectionError, requests.Timeout, requests.exceptions.ChunkedEncodingError) as error:
            print(f"going on: {error}", file=sys.stderr)


def work(route: str, group: str) -> None:
    """A record comes again if it was not acknowledged in time, or if the gate was restarted before: at least once."""
    path, worker = f"/v1/routes/{route}/groups/{group}", f"example-{os.getpid()}"
    while True:
        wanted = {"worker": worker, "max_records": 100, "lease_for": 30, "wait": 20}
        records = ask("POST", f"{path}/lease", json=wanted).json()["records"]
        for record in records:
            show(record)
        if records:
            done = {"worker": worker, "sequences": [record["sequence"] for record in records]}
            for refused in ask("POST", f"{path}/ack", json=done).json()["refused"]:
                print(f"comes again, perhaps: {refused}", file=sys.stderr)


def keep(file: Path, sequence: int) -> None:
    """Replace FILE as a whole, so that it is never half written."""
    new = file.with_name(f"{file.name}.new")
    new.write_text(str(sequence))
    new.replace(file)


def show(record: dict[str, Any]) -> None:
    """Print the value, which is in base64 if it is no UTF-8."""
    value = record["value"].encode() if "value" in record else base64.b64decode(record["value_base64"])
    sys.stdout.buffer.write(value + b"\n")
    sys.stdout.buffer.flush()


def main() -> None:
    match sys.argv[1:]:
        case "store", route:
            store(route)
        case "follow", route, file:
            follow(route, Path(file))
        case "work", route, group:
            work(route, group)
        case _:
            sys.exit(__doc__.split("\n\n")[1])


if __name__ == "__main__":
    main()
