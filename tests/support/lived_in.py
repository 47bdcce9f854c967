"""A log in typical use: some routes of a shop, a stuck group, cuts, deletions, an archive, dead letters."""

import json
from collections.abc import Iterator
from pathlib import Path

from running import Daemon, eventually, reclaim, run, sidecar, wald

from wald.work.group import WorkGroup

SEGMENTS = 10
"""How many times it is cut."""
_ORDERS = 40  # for each segment
_GOODS = ("desk lamp", "teapot", "notebook", "wool blanket", "café au lait bowl", "ladder", "θερμός")


def live_in(daemon: Daemon, archive: Path) -> None:
    """Write to the log of a daemon, let groups read and an archiver pack, and let wald-reclaim delete."""
    root = daemon.root
    for route in ("orders", "payments", "web.access", "sensors", "audit", "mail.dead"):
        daemon.ask(f"ROUTE ADD {route}")
    for group in ("billing", "shipping"):
        _succeed("cursor", "set", "orders", 0, "--group", group, "--root", root)
    for number in range(SEGMENTS):
        _append(root, "orders", b"".join(_orders(number)), "--jsonl")
        _append(root, "payments", b"".join(_payments(number)), "--jsonl")
        _append(root, "web.access", b"".join(_requests(number)))
        if number % 2:
            _append(root, "sensors", b"".join(_readings(number)), "--jsonl")
        _append(root, "audit", f"shift {number} of the warehouse ends, 0 differences\n".encode())
        assert daemon.ask("CUT").startswith("OK")
        _read(root, number)
        if number == SEGMENTS // 2:
            daemon.kill()
            daemon.start_again()
    with WorkGroup(root, "orders", "mail", dead_letter="mail.dead") as mail:
        wrong = 0
        while got := mail.lease("postman", 1000):
            ladders = [record.sequence for record, _ in got if b"ladder" in record.value][::9]
            mail.ack("postman", {record.sequence for record, _ in got} - set(ladders))
            mail.give_up("postman", ladders, "no ladder fits into an envelope")
            wrong += len(ladders)
        eventually(lambda: mail.given_up == wrong)
    for route in ("audit", "payments"):
        packed = run(sidecar("archive", route, "--root", root, "--dest", archive, "--group", "vault"))
        assert packed.returncode == 0, packed.stderr.decode()
    reclaim(root, "--grace", 0)
    _append(root, "orders", b"".join(_orders(SEGMENTS)), "--jsonl")


def _read(root: Path, number: int) -> None:
    """Let the groups read; shipping is stuck after the first half."""
    head = json.loads(wald("head", "--json", "--root", root).stdout)["sequence"]
    for route in ("payments", "web.access", "sensors", "audit"):
        _succeed("cursor", "set", route, head, "--root", root)
    _succeed("cursor", "set", "orders", head - 30, "--group", "billing", "--root", root)
    if number < SEGMENTS // 2:
        _succeed("cursor", "set", "orders", head, "--group", "shipping", "--root", root)


def _orders(number: int) -> Iterator[bytes]:
    for each in range(_ORDERS):
        order = number * _ORDERS + each
        goods = [{"name": _GOODS[(order + i) % len(_GOODS)], "count": 1 + i} for i in range(1 + order % 3)]
        value = {"order": order, "customer": f"c-{order % 17:03}", "goods": goods, "total": f"{order % 90 + 9}.90"}
        yield _line(
            {
                "value": json.dumps(value, ensure_ascii=False),
                "key": f"c-{order % 17:03}",
                "time": f"2026-11-24T{8 + number % 12:02}:{each:02}:00Z",
                "headers": {"trace": f"{order * 7919:016x}", "shop": "lyon" if order % 2 else "turin"},
            }
        )


def _payments(number: int) -> Iterator[bytes]:
    for each in range(20):
        yield _line({"value": json.dumps({"payment": number * 20 + each, "state": "settled"}), "key": f"p-{each}"})


def _requests(number: int) -> Iterator[bytes]:
    for each in range(200):
        status = 500 if each % 67 == 0 else 200
        yield f'192.0.2.{each % 250} "GET /goods/{number * 200 + each} HTTP/1.1" {status} {each * 37 % 9000}\n'.encode()


def _readings(number: int) -> Iterator[bytes]:
    for each in range(10):
        yield _line({"value_hex": bytes((number, each, 0xFF, 0x00, 0x9C, each * 7 % 256) * 8).hex(), "key": "hall-2"})


def _line(record: dict[str, object]) -> bytes:
    return json.dumps(record, ensure_ascii=False).encode() + b"\n"


def _append(root: Path, route: str, data: bytes, *options: str) -> None:
    done = wald("append", route, "--root", root, *options, stdin=data)
    assert done.returncode == 0, done.stderr.decode()


def _succeed(*arguments: object) -> None:
    done = wald(*arguments)
    assert done.returncode == 0, done.stderr.decode()
