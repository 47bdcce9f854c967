"""Whether a request is admitted: who asks, and whether they have the right that its verb needs."""

from __future__ import annotations

from starlette.requests import Request

from wald_gate.problems import HttpError
from wald_gate.rights.clients import CERTIFICATE, PEER, Client, Right, Rights
from wald_gate.rights.sessions import Sessions


class Admission:
    """Judges requests by what the file of tokens says now."""

    def __init__(self, rights: Rights, sessions: Sessions) -> None:
        self._rights = rights
        self._sessions = sessions

    def client(self, request: Request) -> tuple[Client, bool]:
        """Who asks, and whether a session says so; what is said in the request itself comes first.

        Raises:
            HttpError: 401, 403, as of :meth:`Rights.client`.
        """
        authorization = request.headers.get("authorization")
        if (
            authorization is None
            and "cookie" in request.headers
            and (client := self._sessions.client(request)) is not None
        ):
            return client, True
        scope = request.scope
        return self._rights.client(authorization, scope.get(PEER), scope.get(CERTIFICATE)), False

    def require(self, client: Client, right: Right, request: Request) -> None:
        """
        Raises:
            HttpError: 403, the client does not have the right on what the request names.
        """
        route, group = request.path_params.get("route"), request.path_params.get("group")
        if not client.may(right, route, group):
            raise HttpError(
                403,
                "not-permitted",
                f"{client.name} may not do this: it needs {right.of(route, group)}",
                hint="the file of --tokens says who may what",
            )

    def judge(self, request: Request, right: Right) -> None:
        """Judge a request again that was admitted before, and waits.

        Raises:
            HttpError: 401, 403, as if it came now.
        """
        self.require(self.client(request)[0], right, request)
