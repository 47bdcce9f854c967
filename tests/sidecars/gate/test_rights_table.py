"""The rights of each kind of client for every verb and page, as documented in docs/http.md and docs/page.md."""

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
from gating import Answer, Gate, entry, serving
from running import TIMEOUT_SECONDS
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

    has: set[str]
    by: str = ""
    user: int | None = None

    @property
    def is_known(self) -> bool:
        return KNOWN in self.has


READER, WORKER, EVERYTHING = {KNOWN, READ, LOOK}, {KNOWN, LOOK, WORK}, {KNOWN, READ, LOOK, WRITE, WORK, ADMIN}
CLIENTS = {
    "no token": Asking(set()),
    "wrong token": Asking(set(), "guess"),
    "reader": Asking(READER, "reader"),
    "reader of another": Asking({KNOWN}, "reader2"),
    "writer": Asking({KNOWN, WRITE}, "writer"),
    "writer of another": Asking({KNOWN}, "writer2"),
    "worker": Asking(WORKER, "worker"),
    "worker of all groups": Asking(WORKER, "worker2"),
    "worker of another group": Asking({KNOWN}, "worker3"),
    "worker of another route": Asking({KNOWN}, "worker4"),
    "admin": Asking(EVERYTHING, "admin"),
    "owner": Asking(EVERYTHING, user=0),
    "named user": Asking(READER, user=MEMBER.user_id),
    "unknown user": Asking(set(), user=STRANGER.user_id),
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
        user = {"name": "member", "user": user_name(MEMBER.user_id), "read": ["orders"]}
        tokens = (
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
        routes = ("orders", "other")
        with serving(parent / "log", "--uds", parent / "gate.sock", routes=routes, tokens=tokens) as gate:
            gate.daemon.ask("PUB orders 14\nprivate-value")
            made = ask(gate, CLIENTS["admin"], "PUT", CURSOR.format("orders"), {"sequence": 0})
            assert made.status == 200
            yield gate


def ask(gate: Gate, client: Asking, method: str, path: str, body: Any) -> Answer:
    media_type = "application/json" if isinstance(body, dict) else "text/plain"
    data = json.dumps(body).encode() if isinstance(body, dict) else body
    headers = {"Content-Type": media_type}
    if client.user is None:
        return gate.ask(method, path, data, headers, by=client.by)
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
    if TABLE[name][0] in {NONE, *client.has}:
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
        if "{}" not in path or right in {NONE, *client.has}:
            continue
        here, nowhere = (ask(guarded, client, method, path.format(route), body) for route in ("orders", "absent"))
        assert here.status == nowhere.status, name
        assert here.body.replace(b"orders", b"absent") == nowhere.body, name


OUTSIDERS = ("writer of another", "writer", "worker", "worker of another group", "unknown user", "wrong token")


@pytest.mark.parametrize("kind", ["reader of another", *OUTSIDERS])
def test_nothing_of_a_route_is_shown_to_who_may_not_read_it(guarded: Gate, kind: str) -> None:
    """No response reveals its name, groups, values or size."""
    client = CLIENTS[kind]
    assert ask(guarded, CLIENTS["admin"], "PUT", CURSOR.format("orders"), {"sequence": 1}).status == 200
    everywhere = {path: path for _, method, path, _ in TABLE.values() if method == "GET" and "{}" not in path}
    for path in (
        *everywhere,
        "/v1/routes?x=1",
        "/routes?find=der&sort=lag",
        "/records?from=1",
        "/records?from=earliest&to=9",
    ):
        body = ask(guarded, client, "GET", path, None).body
        assert not [word for word in (b"orders", b"secret", b"private-value", b'id="seg-') if word in body], (
            path,
            body,
        )


def test_the_page_of_records_does_not_show_whether_a_route_exists(guarded: Gate) -> None:
    client = CLIENTS["reader of another"]
    for query in ("", "&from=1"):
        path = f"/records?route={{}}{query}"
        here, nowhere = (ask(guarded, client, "GET", path.format(each), None) for each in ("orders", "absent"))
        assert here.status == nowhere.status
        assert here.body.replace(b"orders", b"absent") == nowhere.body
