"""The rights of each kind of client for every verb and page, as documented in docs/http.md and docs/page.md."""

from __future__ import annotations

import http.client
import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gating import Answer, Gate, entry
from running import TIMEOUT_SECONDS, Daemon
from users import MEMBER, STRANGER, acting_as, needs_root

from wald.hints import user_name
from wald_gate.app import VERBS
from wald_gate.page.views import PAGES

pytestmark = needs_root
RECORDS, CURSOR, GROUP = "/v1/routes/{}/records", "/v1/routes/{}/cursors/secret", "/v1/routes/{}/groups/secret/"
NONE, KNOWN, READ, WRITE, ADMIN = "nothing", "any token", "read", "write", "admin"
LOOK, WORK = "read, or work for the group", "work for the group"
OF_GROUP = {"worker": "ann", "sequences": [1]}

TABLE: dict[str, tuple[str, str, str, Any]] = {
    "append": (WRITE, "POST", RECORDS, b"x\n"),
    "records": (READ, "GET", RECORDS, None),
    "cursor": (LOOK, "GET", CURSOR, None),
    "set_cursor": (WORK, "PUT", CURSOR, {"sequence": 1}),
    "lease": (WORK, "POST", f"{GROUP}lease", {"worker": "ann"}),
    "ack": (WORK, "POST", f"{GROUP}ack", OF_GROUP),
    "nack": (WORK, "POST", f"{GROUP}nack", OF_GROUP),
    "extend": (WORK, "POST", f"{GROUP}extend", OF_GROUP),
    "release": (WORK, "POST", f"{GROUP}release", {"worker": "ann"}),
    "groups": (READ, "GET", "/v1/routes/{}/groups", None),
    "remove_group": (WORK, "DELETE", GROUP[:-1], None),
    "pending": (LOOK, "GET", f"{GROUP}pending", None),
    "routes": (KNOWN, "GET", "/v1/routes", None),
    "add_route": (ADMIN, "POST", "/v1/routes/{}", None),
    "head": (KNOWN, "GET", "/v1/head", None),
    "where": (ADMIN, "GET", "/v1/where/1", None),
    "explain": (ADMIN, "GET", "/v1/explain", None),
    "cut": (ADMIN, "POST", "/v1/cut", None),
    "healthz": (NONE, "GET", "/healthz", None),
    "readyz": (NONE, "GET", "/readyz", None),
    "metrics": (KNOWN, "GET", "/metrics", None),
    "openapi": (NONE, "GET", "/openapi.json", None),
    "overview": (KNOWN, "GET", "/", None),
    "browse": (KNOWN, "GET", "/records", None),
    "find_record": (KNOWN, "GET", "/record?sequence=1", None),
    "record": (KNOWN, "GET", "/records/1", None),
    "value": (KNOWN, "GET", "/records/1/value", None),
    "history": (ADMIN, "GET", "/history", None),
    "route_table": (KNOWN, "GET", "/routes", None),
    "route": (READ, "GET", "/routes/{}", None),
    "live": (KNOWN, "GET", "/live", None),
    "login": (NONE, "GET", "/login", None),
    "log_in": (NONE, "POST", "/login", None),
    "log_out": (NONE, "POST", "/logout", None),
    "asset": (NONE, "GET", "/assets/page.css", None),
}
"""The right that each verb requires, and a request for it, with {} for the route."""
OF_RECORD = ("record", "value")  # a token and the right to read the record's route


@dataclass(frozen=True)
class Asking:
    """A kind of client: its token or its user on the unix socket, and its rights."""

    has: frozenset[str]
    token: str = ""
    user: int | None = None

    @property
    def is_known(self) -> bool:
        return KNOWN in self.has


def asking(*has: str, token: str = "", user: int | None = None) -> Asking:
    return Asking(frozenset({NONE, *has}), token, user)


CLIENTS = {
    "no token": asking(),
    "wrong token": asking(token="guess"),
    "reader": asking(KNOWN, READ, LOOK, token="reader-token"),
    "reader of another": asking(KNOWN, token="reader2-token"),
    "writer": asking(KNOWN, WRITE, token="writer-token"),
    "writer of another": asking(KNOWN, token="writer2-token"),
    "worker": asking(KNOWN, LOOK, WORK, token="worker-token"),
    "worker of all groups": asking(KNOWN, LOOK, WORK, token="worker2-token"),
    "worker of another group": asking(KNOWN, token="worker3-token"),
    "worker of another route": asking(KNOWN, token="worker4-token"),
    "admin": asking(KNOWN, READ, LOOK, WRITE, WORK, ADMIN, token="admin-token"),
    "owner": asking(KNOWN, READ, LOOK, WRITE, WORK, ADMIN, user=0),
    "named user": asking(KNOWN, READ, LOOK, user=MEMBER.user_id),
    "unknown user": asking(user=STRANGER.user_id),
}


class _Unix(http.client.HTTPConnection):
    """HTTP connection over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("log", timeout=TIMEOUT_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_SECONDS)
        self.sock.connect(os.fspath(self._path))


@pytest.fixture(scope="module")
def guarded() -> Iterator[Gate]:
    with tempfile.TemporaryDirectory() as name:
        parent = Path(name)
        parent.chmod(0o755)
        tokens = parent / "tokens"
        user = {"name": "member", "user": user_name(MEMBER.user_id), "read": ["orders"]}
        tokens.write_text(
            entry("reader", read=["orders"])
            + entry("reader2", read=["other"])
            + entry("writer", write=["orders"])
            + entry("writer2", write=["other"])
            + entry("worker", work=["orders/secret"])
            + entry("worker2", work=["ord*"])
            + entry("worker3", work=["orders/other", "orders/s", "other/*"])
            + entry("worker4", work=["*/other", "other", "secret", "ordersx/secret"])
            + entry("admin", admin=True)
            + json.dumps(user)
        )
        with Daemon(parent / "log") as daemon:
            for route in ("orders", "other"):
                daemon.ask(f"ROUTE ADD {route}")
            daemon.ask("PUB orders 14\nprivate-value\n")
            with Gate(daemon.root, "--tokens", tokens, "--uds", parent / "gate.sock") as gate:
                made = ask(gate, CLIENTS["admin"], "PUT", CURSOR.format("orders"), {"sequence": 0})
                assert made.status == 200
                yield gate
                assert "Traceback" not in gate.log


def ask(gate: Gate, client: Asking, method: str, path: str, body: Any) -> Answer:
    media_type = "application/json" if isinstance(body, dict) else "text/plain"
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"Content-Type": media_type} | ({"Authorization": f"Bearer {client.token}"} if client.token else {})
    if client.user is None:
        return gate.ask(method, path, data, headers)
    with acting_as(client.user), closing(_Unix(gate.root.with_name("gate.sock"))) as connection:
        connection.request(method, path, data, headers)
        response = connection.getresponse()
        return Answer(response.status, dict(response.getheaders()), response.read())


def outcome(method: str, answer: Answer) -> str:
    to_login = answer.headers.get("location", "").endswith("/login")
    if answer.status == 401 or (answer.status, to_login, method) == (303, True, "GET"):
        return "who?"
    return "no" if answer.status == 403 else "yes"


def expected(client: Asking, name: str) -> str:
    if TABLE[name][0] in client.has:
        return "yes"
    return "no" if client.is_known or client.user is not None else "who?"


def test_every_verb_and_every_page_has_a_row() -> None:
    assert set(TABLE) == {verb.name for verb in (*VERBS, *PAGES)}
    assert {verb.name: verb.method for verb in (*VERBS, *PAGES)} == {name: row[1] for name, row in TABLE.items()}


@pytest.mark.parametrize("kind", CLIENTS)
def test_each_client_may_do_what_the_table_says(guarded: Gate, kind: str) -> None:
    client = CLIENTS[kind]
    found = {}
    for name, (_, method, path, body) in TABLE.items():
        answer = ask(guarded, client, method, path.format("orders"), body)
        assert answer.status < 500, (name, answer.body)
        found[name] = outcome(method, answer)
        if method == "GET":
            assert ask(guarded, client, "HEAD", path.format("orders"), None).status == answer.status, name
    wanted = {name: expected(client, name) for name in TABLE}
    if client.is_known and READ not in client.has:
        wanted |= dict.fromkeys(OF_RECORD, "no")

    assert found == wanted


@pytest.mark.parametrize("kind", CLIENTS)
def test_a_refusal_does_not_show_whether_a_route_exists(guarded: Gate, kind: str) -> None:
    client = CLIENTS[kind]
    for name, (right, method, path, body) in TABLE.items():
        if "{}" not in path or right in client.has:
            continue
        here, nowhere = (ask(guarded, client, method, path.format(route), body) for route in ("orders", "absent"))
        assert here.status == nowhere.status, name
        assert here.body.replace(b"orders", b"absent") == nowhere.body, name


@pytest.mark.parametrize(
    "kind",
    [
        "reader of another",
        "writer of another",
        "writer",
        "worker",
        "worker of another group",
        "unknown user",
        "wrong token",
    ],
)
def test_nothing_of_a_route_is_shown_to_who_may_not_read_it(guarded: Gate, kind: str) -> None:
    """No response reveals its name, groups, values or size."""
    client = CLIENTS[kind]
    assert ask(guarded, CLIENTS["admin"], "PUT", CURSOR.format("orders"), {"sequence": 1}).status == 200
    everywhere = {path: path for _, method, path, _ in TABLE.values() if method == "GET" and "{}" not in path}
    for path in (*everywhere, "/v1/routes?x=1", "/records?from=1", "/records?from=earliest&to=9"):
        body = ask(guarded, client, "GET", path, None).body
        assert not [word for word in (b"orders", b"secret", b"private-value") if word in body], (path, body)


def test_the_page_of_a_record_and_of_records_do_not_show_whether_a_route_exists(guarded: Gate) -> None:
    client = CLIENTS["reader of another"]
    for here, nowhere in (
        ("/records?route=orders", "/records?route=absent"),
        ("/records?route=orders&from=1", "/records?route=absent&from=1"),
    ):
        answers = [ask(guarded, client, "GET", path, None) for path in (here, nowhere)]
        assert answers[0].status == answers[1].status
        assert answers[0].body.replace(b"orders", b"absent") == answers[1].body
