"""TLS for clients: versions, certificates, and certificate changes while connections are open."""

import http.client
import json
import re
import signal
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from gating import ORDERS, Gate, received
from running import TIMEOUT_SECONDS, Daemon, eventually, output_of, refused, run, sidecar

from wald.errors import InvalidInput
from wald_gate.auth.tokens import clients_in
from wald_gate.http.server import Listening
from wald_gate.http.tls import Handshake, expiry, first_expiry, server_context
from wald_gate.limits import ConnectionPool
from wald_gate.settings import LimitSettings, Settings


def openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)


@dataclass(frozen=True)
class Authority:
    """Certificate authority that writes certificates and keys to files."""

    directory: Path
    name: str

    def __post_init__(self) -> None:
        openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2,
                "-subj", f"/CN={self.name}", "-keyout", self._file("key"), "-out", self.certificate)  # fmt: skip

    @property
    def certificate(self) -> Path:
        return self._file("pem")

    def sign(self, common_name: str, *, days: int = 2, names: str = "DNS:localhost") -> Path:
        """Write a certificate for ``names`` and its key to a file; without a common name it has only ``names``."""
        request, made = self._file("csr"), self.directory / f"{self.name}-{common_name}-{days}-{hash(names)}.pem"
        if made.exists():
            return made
        openssl("req", "-new", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes",
                "-subj", f"/CN={common_name}" if common_name else "/", "-addext", f"subjectAltName={names}",
                "-keyout", f"{made}.key", "-out", request)  # fmt: skip
        openssl("x509", "-req", "-in", request, "-CA", self.certificate, "-CAkey", self._file("key"), "-days", days,
                "-copy_extensions", "copy", "-out", made)  # fmt: skip
        made.write_text(made.read_text() + Path(f"{made}.key").read_text())
        return made

    def _file(self, kind: str) -> Path:
        return self.directory / f"{self.name}.{kind}"


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("ours"), "ours")


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """An authority that the gate does not trust at first."""
    return Authority(tmp_path_factory.mktemp("theirs"), "theirs")


@pytest.fixture
def gate(daemon: Daemon, authority: Authority, tmp_path: Path) -> Iterator[Gate]:
    """A gate with TLS on which the client shop may read orders."""
    tokens = json.dumps({"name": "shop", "certificate": "shop.example", "read": ["orders"]}) + "\n"
    served, authorities = tmp_path / "gate.pem", tmp_path / "authorities.pem"
    served.write_bytes(authority.sign("gate").read_bytes())
    authorities.write_bytes(authority.certificate.read_bytes())
    with Gate(daemon.root, "--certificate", served, "--client-ca", authorities, tokens=tokens) as running:
        yield running


def trusting(authority: Authority, certificate: Path | None = None) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=authority.certificate)
    if certificate is not None:
        context.load_cert_chain(certificate)
    return context


def connected(gate: Gate, context: ssl.SSLContext) -> http.client.HTTPSConnection:
    return http.client.HTTPSConnection("localhost", gate.port, context=context, timeout=TIMEOUT_SECONDS)


def answered(connection: http.client.HTTPSConnection, path: str = ORDERS) -> tuple[int, str]:
    connection.request("GET", path)
    answer = connection.getresponse()
    return answer.status, answer.read().decode()


def asked(gate: Gate, context: ssl.SSLContext, path: str = ORDERS) -> int:
    """Return the status of a request over a new connection."""
    with closing(connected(gate, context)) as connection:
        return answered(connection, path)[0]


def metrics(gate: Gate, context: ssl.SSLContext) -> str:
    with closing(connected(gate, context)) as connection:
        return answered(connection, "/metrics")[1]


def is_refused(gate: Gate, context: ssl.SSLContext) -> bool:
    """Return True if the gate refuses the connection, which TLS 1.3 reports with the first response."""
    try:
        asked(gate, context)
    except (ssl.SSLError, ConnectionError, http.client.RemoteDisconnected):
        return True
    return False


def expiry_of(path: Path) -> float:
    """Return the expiry of the first certificate in a file, according to openssl."""
    done = subprocess.run(["openssl", "x509", "-noout", "-enddate", "-in", path], check=True, capture_output=True)
    return ssl.cert_time_to_seconds(done.stdout.decode().strip().removeprefix("notAfter="))


def test_the_expiry_of_the_first_certificate_to_expire_is_read_and_what_is_none_is_refused(
    authority: Authority,
) -> None:
    for days in [1, 9_000, 12_000]:
        path = authority.sign("gate", days=days)
        assert first_expiry(path) == expiry_of(path)
    soon, late = authority.sign("gate", days=1), authority.sign("gate", days=9)
    both = authority.directory / "both.pem"
    both.write_text(late.read_text() + soon.read_text())
    assert first_expiry(both) == expiry_of(soon)
    both.write_text(late.read_text() + "# " + soon.read_text())  # OpenSSL skips it
    assert first_expiry(both) == expiry_of(late)
    whole = ssl.PEM_cert_to_DER_cert(authority.certificate.read_text())
    for size in range(0, len(whole), 7):
        with pytest.raises(ValueError, match="not a certificate"):
            expiry(whole[:size])


def test_metrics_say_when_certificates_expire_and_of_new_ones_after_sighup(gate: Gate, authority: Authority) -> None:
    client = trusting(authority, authority.sign("shop.example"))

    def said() -> dict[str, float]:
        pattern = r'^wald_gate_certificate_expiry_timestamp_seconds{file="(\w+)"} (\S+)$'
        found = re.findall(pattern, metrics(gate, client), re.MULTILINE)
        return {name: float(value) for name, value in found}

    served = gate.root.with_name("gate.pem")
    assert said() == {"certificate": expiry_of(served), "authorities": expiry_of(authority.certificate)}
    served.write_text(authority.sign("gate", days=30).read_text())
    gate.reload()
    after = said()
    assert after["certificate"] == expiry_of(served)
    served.write_text("no certificate")
    assert "the previous settings remain effective" in gate.reload()
    assert said() == after


def test_a_certificate_says_who_asks_over_tls_1_2_and_above(gate: Gate, authority: Authority) -> None:
    for version, taken in ((ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True)):
        context = trusting(authority)
        context.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning, match="TLSv1_1") if not taken else nullcontext():
            context.minimum_version = context.maximum_version = version
        assert is_refused(gate, context) is not taken
    shop = trusting(authority, authority.sign("shop.example"))

    assert asked(gate, shop) == 200
    assert asked(gate, shop, "/v1/routes/other/records") == 403
    assert asked(gate, trusting(authority, authority.sign("nobody"))) == 401
    assert asked(gate, trusting(authority)) == 401
    for names, status in (("URI:shop.example", 200), ("DNS:shop.example,DNS:other", 401)):  # without a common name
        assert asked(gate, trusting(authority, authority.sign("", names=names))) == status


def test_client_and_log_are_told_why_a_certificate_is_refused(
    gate: Gate, authority: Authority, stranger: Authority
) -> None:
    """In TLS 1.3 the client sends its request together with the certificate; in TLS 1.2 it does not."""
    expired = trusting(authority, authority.sign("shop.example", days=-1))
    unknown = trusting(authority, stranger.sign("shop.example"))
    for version in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        expired.maximum_version = unknown.maximum_version = version
        with pytest.raises(ssl.SSLError, match="alert certificate expired"):
            asked(gate, expired)
        with pytest.raises(ssl.SSLError, match="alert unknown ca"):
            asked(gate, unknown)

    assert gate.log.count("the certificate of 127.0.0.1 is refused: certificate has expired\n") == 1
    assert gate.log.count("the certificate of 127.0.0.1 is refused: unable to get local issuer certificate\n") == 1


def test_what_a_client_sends_after_its_certificate_is_refused_is_not_kept(
    authority: Authority, stranger: Authority
) -> None:
    pem = authority.sign("gate")
    served = server_context(pem, pem, authority.certificate)
    served.sslobject_class = type("Refused", (Handshake,), {"pool": ConnectionPool(LimitSettings()), "reported": {}})
    ours, theirs = ssl.MemoryBIO(), ssl.MemoryBIO()
    server = served.wrap_bio(ours, theirs, server_side=True)
    client = trusting(authority, stranger.sign("shop.example")).wrap_bio(theirs, ours, server_hostname="localhost")
    for step in (client, server, client):
        with suppress(ssl.SSLWantReadError):
            step.do_handshake()

    for _ in range(2):
        client.write(bytes(200_000))
        with pytest.raises(ssl.SSLWantReadError):
            server.do_handshake()
        assert not ours.pending


def test_sighup_takes_new_certificates_while_connections_go_on(
    gate: Gate, authority: Authority, stranger: Authority, tmp_path: Path
) -> None:
    with closing(connected(gate, trusting(authority, authority.sign("shop.example")))) as old:
        assert answered(old)[0] == 200
        (tmp_path / "gate.pem").write_bytes(stranger.sign("gate").read_bytes())
        both = authority.certificate.read_bytes() + stranger.certificate.read_bytes()
        (tmp_path / "authorities.pem").write_bytes(both)
        gate.reload()
        new = trusting(stranger, stranger.sign("shop.example"))
        assert asked(gate, new) == 200
        assert answered(old)[0] == 200
        (tmp_path / "gate.pem").write_bytes(authority.certificate.read_bytes())
        assert "gate.pem" in gate.reload()
        assert asked(gate, new) == 200


def test_errors_name_the_file_that_is_wrong(authority: Authority) -> None:
    for certificate, key, authorities, wrong, said in [
        ("pem", "other.key", "pem", "pem", "the key in {} belongs to another certificate"),
        ("key", "key", "pem", "key", "the file has no certificate"),
        ("damaged.pem", "key", "pem", "damaged.pem", "a certificate in it is damaged"),
        ("pem", "damaged.key", "pem", "damaged.key", "the private key is damaged"),
        ("none", "key", "pem", "none", "No such file or directory"),
        ("pem", "none", "pem", "none", "No such file or directory"),
        ("pem", "key", "none", "none", "No such file or directory"),
        ("pem", "key", "key", "key", "the file has no certificate"),
    ]:
        directory = authority.directory
        (directory / "other.key").write_text(Path(f"{authority.sign('b')}.key").read_text())
        both = authority.sign("a").read_text()
        start = both.index("-----BEGIN PRIVATE")
        for name, text in (("pem", both[:start]), ("key", both[start:])):
            (directory / name).write_text(text)
            (directory / f"damaged.{name}").write_text(text.replace("\nM", "\n!", 1))

        with pytest.raises(InvalidInput) as found:
            server_context(directory / certificate, directory / key, directory / authorities)

        assert found.value.message == f"{directory / wrong}: {said.format(directory / key)}"
        assert str(directory / wrong) in found.value.hint


def test_files_that_others_may_write_are_refused_also_at_sighup(
    gate: Gate, authority: Authority, tmp_path: Path
) -> None:
    """Anyone who can write these files controls authentication; the files read before stay effective."""
    shop = trusting(authority, authority.sign("shop.example"))
    for name, mode in (("tokens", 0o622), ("gate.pem", 0o620), ("authorities.pem", 0o666)):
        path = tmp_path / name
        path.chmod(mode)
        with pytest.raises(InvalidInput, match=f"{name}: (its group|every user) may write it") as found:
            clients_in(path) if name == "tokens" else server_context(
                tmp_path / "gate.pem", tmp_path / "gate.pem", tmp_path / "authorities.pem"
            )
        assert found.value.hint == f"chmod go-w {path}"
        assert f"hint: {found.value.hint}\n" in gate.reload()
        assert asked(gate, shop) == 200
        path.chmod(0o640)


def test_check_says_what_is_wrong_with_a_certificate(authority: Authority, root: Path) -> None:
    line = sidecar("gate", "--root", root, "--check", "--certificate")
    assert b"expired" not in run([*line, str(authority.sign("gate"))]).stderr
    expired = authority.sign("gate", days=-1)
    assert f"wald-gate: {expired}: a certificate in it has expired on 20" in run([*line, str(expired)]).stderr.decode()
    pem = str(authority.sign("gate"))
    without_tokens = run([*line, pem, "--client-ca", str(authority.certificate)])
    assert b"--client-ca: client certificates need TLS" in without_tokens.stderr
    alone, text = authority.directory / "alone.pem", Path(pem).read_text()
    alone.write_text(text[text.index("-----BEGIN CERT") : text.index("-----END CERT")] + "-----END CERTIFICATE-----\n")
    assert refused(run([*line, str(alone)])) == (
        InvalidInput.exit_code,
        f"{alone}: the file has no private key",
        f"--certificate {alone} --key FILE",
    )


def test_beyond_loopback_it_listens_with_tls_and_tokens_only(authority: Authority, root: Path) -> None:
    for host in ["0.0.0.0", "[::]", "0", "", "192.0.2.1", "[2001:db8::1]"]:
        with pytest.raises(InvalidInput, match="without TLS and tokens"):
            Listening(Settings(listen=f"{host}:0"))
    line = sidecar("gate", "--root", root, "--check", "--listen", "0.0.0.0:0")
    certificate = ["--certificate", str(authority.sign("gate"))]
    tokens = authority.directory / "tokens"
    tokens.touch()

    assert b"without TLS and tokens" in run(line).stderr
    assert b"without tokens" in run([*line, *certificate]).stderr
    assert b"without TLS" in run([*line, "--tokens", str(tokens)]).stderr
    assert run([*line, *certificate, "--tokens", str(tokens)]).returncode == 0
    assert run([*line, "--insecure"]).returncode == 0


def is_closed(connection: socket.socket) -> bool:
    """Wait for the gate to close the connection; return True if it does."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


@contextmanager
def limited(daemon: Daemon, authority: Authority, limits: str) -> Iterator[Gate]:
    """A gate with TLS and without tokens."""
    with Gate(daemon.root, "--certificate", authority.sign("gate"), config=f"[limits]\n{limits}\n") as gate:
        yield gate
        assert gate.stop() == 0
        assert "Traceback" not in gate.log


def test_handshakes_that_do_not_go_on_end_in_time(daemon: Daemon, authority: Authority) -> None:
    with limited(daemon, authority, "head_timeout = 1\nconnections_max = 10") as gate, ExitStack() as stack:
        slow = [stack.enter_context(gate.connect()) for _ in range(9)]
        for each in slow[::2]:
            each.sendall(b"\x16\x03\x01\x02")  # the first bytes of a handshake record
        assert asked(gate, trusting(authority)) == 200
        assert all(map(is_closed, slow))
        assert asked(gate, trusting(authority)) == 200


def test_a_handshake_has_a_place_and_the_one_that_waits_for_longest_makes_way(
    daemon: Daemon, authority: Authority
) -> None:
    client = trusting(authority)
    with limited(daemon, authority, "head_timeout = 3600\nconnections_max = 3") as gate, ExitStack() as stack:
        idle = stack.enter_context(closing(connected(gate, client)))
        assert answered(idle)[0] == 200
        held = [stack.enter_context(gate.connect()) for _ in range(3)]
        assert is_closed(idle.sock)
        text = metrics(gate, client)
        assert is_closed(held[0])
        assert 'wald_gate_connections{state="handshake"} 2.0' in text
        assert 'wald_gate_connections{state="idle"} 0.0' in text
        assert 'connections_ended_total{reason="made way"} 2.0' in text


def test_handshakes_that_make_way_before_they_begin_give_their_places_back(
    daemon: Daemon, authority: Authority
) -> None:
    """The evicted connections were accepted together with those that evict them."""

    with limited(daemon, authority, "head_timeout = 3600\nconnections_max = 4") as gate:
        gate.process.send_signal(signal.SIGSTOP)
        burst = [gate.connect() for _ in range(60)]
        gate.process.send_signal(signal.SIGCONT)
        assert all(map(is_closed, burst[:40]))
        for each in burst:
            each.close()
        eventually(lambda: 'connections{state="handshake"} 0.0' in metrics(gate, trusting(authority)))


def test_handshakes_of_one_address_have_a_bound_and_one_that_fails_gives_its_place_back(
    daemon: Daemon, authority: Authority
) -> None:
    limits = "head_timeout = 3600\nconnections_per_address = 2"
    with limited(daemon, authority, limits) as gate, ExitStack() as stack:
        held = [stack.enter_context(gate.connect()) for _ in range(2)]
        assert is_closed(stack.enter_context(gate.connect()))
        held[0].sendall(b"GET / HTTP/1.1\r\n\r\n")  # plain HTTP
        eventually(lambda: not is_refused(gate, trusting(authority)))
        held[1].close()
        eventually(lambda: not is_refused(gate, trusting(authority)))


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_an_authority_that_was_removed_gives_no_right_any_more(
    gate: Gate, authority: Authority, stranger: Authority, tmp_path: Path, version: ssl.TLSVersion
) -> None:
    """A resumed session, an open connection and a streaming response all lose their rights."""
    context = trusting(authority, authority.sign("shop.example"))
    context.maximum_version = version

    stack = ExitStack()

    def asking(session: ssl.SSLSession | None, path: str = ORDERS) -> ssl.SSLSocket:
        plain = stack.enter_context(gate.connect())
        connection = stack.enter_context(context.wrap_socket(plain, server_hostname="localhost", session=session))
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200 ")
        return connection

    with stack:
        stands, follows = asking(None), asking(None, f"{ORDERS}?follow=1")
        assert asking(stands.session).session_reused
        (tmp_path / "authorities.pem").write_bytes(stranger.certificate.read_bytes())
        gate.reload()
        while stands.recv(1 << 16):
            pass
        output_of("append", "orders", "--root", gate.root, stdin=b"news\n")
        assert b"news" not in received(follows)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            asking(stands.session)


def test_a_certificate_that_signs_no_other_and_was_removed_gives_no_right_any_more(
    gate: Gate, authority: Authority, tmp_path: Path
) -> None:
    """The ``--authorities`` file may contain a client's certificate itself."""
    pinned = tmp_path / "pinned.pem"
    openssl("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", 2,
            "-subj", "/CN=shop.example", "-addext", "basicConstraints=critical,CA:FALSE",
            "-keyout", tmp_path / "pinned.key", "-out", pinned)  # fmt: skip
    context = trusting(authority)
    context.load_cert_chain(pinned, tmp_path / "pinned.key")
    authorities = tmp_path / "authorities.pem"
    with authorities.open("ab") as file:
        file.write(b"# Caf\xe9\n" + pinned.read_bytes())
    gate.reload()
    assert not is_refused(gate, context)
    with closing(connected(gate, context)) as stands:
        assert answered(stands)[0] == 200
        authorities.write_bytes(authority.certificate.read_bytes())
        gate.reload()
        assert is_refused(gate, context)
        with pytest.raises((ssl.SSLError, ConnectionError)):
            answered(stands)[0]
