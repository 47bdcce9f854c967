"""The table of pages: verbs for people, which the application is made from, and which the OpenAPI document leaves out.

They answer HTML that changes whenever it looks better, so no program may rely on it; what programs want is at ``/v1``.
"""

from __future__ import annotations

from functools import partial

from wald_gate.page.assets import asset
from wald_gate.page.frame import HTML, failed, only_frame
from wald_gate.page.history import history
from wald_gate.page.login import form, log_in, log_out
from wald_gate.page.overview import overview
from wald_gate.page.record import record, value
from wald_gate.page.records import find, records
from wald_gate.page.routes import route, routes
from wald_gate.rights.clients import Right
from wald_gate.verbs import Verb

_GET, _POST = "GET", "POST"
_page = partial(Verb, answers={HTML: None}, failed=failed)


PAGES: tuple[Verb, ...] = (
    _page(_GET, "/", "overview", "The log at a glance.", Right.KNOWN, overview),
    _page(_GET, "/records", "browse", "Records of a route.", Right.KNOWN, records),
    _page(_GET, "/record", "find_record", "From a sequence that was typed to its page.", Right.KNOWN, find),
    _page(_GET, "/records/{sequence}", "record", "A record, or what became of it.", Right.KNOWN, record),
    _page(_GET, "/records/{sequence}/value", "value", "The bytes of a record, as a file.", Right.KNOWN, value),
    _page(_GET, "/history", "history", "What happened to the log.", Right.ADMIN, history),
    _page(_GET, "/routes", "route_table", "The routes, and how far behind they are.", Right.KNOWN, routes),
    _page(_GET, "/routes/{route}", "route", "A route with its groups, and why it pins what.", Right.READ, route),
    _page(_GET, "/live", "live", "What changes in the frame of every page.", Right.KNOWN, only_frame),
    _page(_GET, "/login", "login", "Where a token is typed.", Right.NONE, form),
    _page(_POST, "/login", "log_in", "A session for a token.", Right.NONE, log_in),
    _page(_POST, "/logout", "log_out", "The end of a session.", Right.NONE, log_out),
    _page(_GET, "/assets/{name}", "asset", "The style and the script.", Right.NONE, asset),
)
