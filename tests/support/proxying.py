"""nginx, haproxy and Caddy as processes in front of a gate, with the configurations of docs/http.md."""

import os
import re
import socket
import subprocess
from http.client import HTTPConnection
from pathlib import Path
from typing import Self

from gating import Gate
from programs import program
from running import TIMEOUT_SECONDS, eventually

PREFIX = "/wald"
PORT = 18080
_PAGE = Path(__file__).parents[2] / "docs" / "http.md"
NGINX = """
daemon off;
master_process off;
pid {directory}/nginx.pid;
error_log stderr;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    proxy_read_timeout {timeout}s;
    send_timeout {timeout}s;
    server {{
        listen {address};
        {documented}
    }}
}}
"""
HAPROXY = """
defaults
    mode http
    timeout connect 60s
    timeout client {timeout}s
frontend public
    bind {address}
    use_backend wald if {{ path /wald }} or {{ path_beg /wald/ }}
    default_backend wald
{documented}
"""
CADDY = """
{{
    admin off
    auto_https off
    default_bind {host}
}}
{documented}
"""
SETTINGS = {"nginx": NGINX, "haproxy": HAPROXY, "caddy": CADDY}
COMMANDS = {
    "nginx": ["-e", "stderr", "-c"],
    "haproxy": ["-db", "-f"],
    "caddy": ["run", "--adapter", "caddyfile", "--config"],
}


def documented(name: str, *, below: bool = False) -> str:
    """Return the configuration of a proxy on the page."""
    pattern = rf"^{name}\b[^\n]*:\n\n```text\n(.*?)```"
    found: list[str] = re.findall(pattern, _PAGE.read_text(), re.DOTALL | re.MULTILINE | re.IGNORECASE)
    assert len(found) == 2, name
    return found[below]


def own_host() -> str:
    """Return a loopback address that no other process uses."""
    return "127." + ".".join(str(each) for each in (os.getpid() + (1 << 20)).to_bytes(3, "big"))


class Proxy:
    """A proxy in front of a gate; leaving a ``with`` block kills it."""

    def __init__(self, name: str, gate: Gate, directory: Path, given: str = "", timeout: int = 60) -> None:
        """ """
        self._path = program(name)
        self.address = f"{own_host()}:{PORT}"
        given = (given or documented(name)).replace("127.0.0.1:7700", f"127.0.0.1:{gate.port}")
        given = given.replace("log.example", self.origin).replace("60s", f"{timeout}s")
        settings = directory / f"{name}.conf"
        settings.write_text(
            SETTINGS[name].format(
                directory=directory, host=own_host(), address=self.address, documented=given, timeout=timeout
            )
        )
        self._log = directory / f"{name}.log"
        environment = {**os.environ, "HOME": str(directory)}
        with self._log.open("ab") as log:
            line = [self._path, *COMMANDS[name], str(settings)]
            self._process = subprocess.Popen(line, stdout=log, stderr=log, env=environment)

    def __enter__(self) -> Self:
        try:
            eventually(self._answers)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        try:
            socket.create_connection((own_host(), PORT)).close()
        except ConnectionRefusedError:
            return False
        return True

    @property
    def origin(self) -> str:
        return f"http://{self.address}"

    def connect(self) -> HTTPConnection:
        return HTTPConnection(own_host(), PORT, timeout=TIMEOUT_SECONDS)

    def ask(
        self, method: str, path: str, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return the status, the headers and the body of an answer."""
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read()
        finally:
            connection.close()
