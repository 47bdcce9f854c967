"""Tells a client that its TLS certificate is refused, and the operator, whose log says which client that is.

asyncio and uvloop close such a connection without a word: what OpenSSL has to say to the client stays unsent.
"""

from __future__ import annotations

import logging
import ssl
import time
from contextvars import ContextVar

from wald_gate.transport.connection import Bounds, Ended

_TURNS = 8  # of what the client still sends before it reads the alert; a close on unread bytes would take that away
_REPORT_SECONDS = 10.0  # between lines with one reason
_log = logging.getLogger("wald_gate")

CLIENT: ContextVar[str] = ContextVar("client", default="a client")
"""The address at the other end of the handshake."""


class Context(ssl.SSLContext):
    """Certificates, for handshakes that know where comes in what their clients send.

    Attributes:
        authorities: all that a client is believed by, in base64; ``get_ca_certs`` leaves out those that may not sign
            others.
    """

    authorities: frozenset[bytes] = frozenset()

    def wrap_bio(
        self,
        incoming: ssl.MemoryBIO,
        outgoing: ssl.MemoryBIO,
        server_side: bool = False,
        server_hostname: str | bytes | None = None,
        session: ssl.SSLSession | None = None,
    ) -> ssl.SSLObject:
        made = super().wrap_bio(incoming, outgoing, server_side, server_hostname, session)
        if isinstance(made, Handshake):
            made.incoming = incoming
        return made


class Handshake(ssl.SSLObject):
    """One handshake. ``bounds`` and ``reported`` are set in a class of its own for each server.

    Attributes:
        incoming: what the client has sent and OpenSSL has not read yet.
        reported: when a reason was written to the log last, in monotonic seconds.
    """

    bounds: Bounds
    incoming: ssl.MemoryBIO
    reported: dict[str, float]
    _failure: ssl.SSLCertVerificationError | None = None
    _turns = 0

    def do_handshake(self) -> None:
        """
        Raises:
            ssl.SSLWantReadError: bytes of the client are missing; those for it are to be sent.
            ssl.SSLError: there is no connection.
        """
        if self._failure is None:
            try:
                super().do_handshake()
            except ssl.SSLCertVerificationError as error:
                self._failure = error
                self._report(error.verify_message)
            else:
                return
        self._turns += 1
        self.incoming.read()  # OpenSSL does not any more, and these would be kept for as long as the connection
        if self._turns > _TURNS:
            raise self._failure
        raise ssl.SSLWantReadError

    def _report(self, reason: str) -> None:
        self.bounds.ended[Ended.CERTIFICATE] += 1
        now = time.monotonic()
        if now - self.reported.get(reason, float("-inf")) >= _REPORT_SECONDS:
            self.reported[reason] = now
            _log.warning("wald-gate: the certificate of %s is refused: %s", CLIENT.get(), reason)
