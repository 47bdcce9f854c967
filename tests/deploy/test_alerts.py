"""Alerts fire correctly, each has a runbook, and every query uses exported metrics."""

import json
import re
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import pytest
import yaml
from endpoint import free_address
from logs import Built
from pages import ROOT, headings
from running import TIMEOUT_SECONDS, Daemon, eventually, launched, output_of, run, sidecar

MONITORING = ROOT / "monitoring"
RULES = MONITORING / "wald.rules.yml"
CASES = MONITORING / "wald.rules.test.yml"
ALERTS: list[dict[str, Any]] = yaml.safe_load(RULES.read_text())["groups"][0]["rules"]
DASHBOARD: dict[str, Any] = json.loads((MONITORING / "dashboard.json").read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [alert["expr"] for alert in ALERTS] + [target["expr"] for panel in PANELS for target in panel["targets"]]
PROGRAMS = ("daemon", "reclaim", "drain", "gate")
NAME = re.compile(r"\bwald_\w+")


def promtool(*arguments: object, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """Return promtool's output and exit code."""
    line = [programs.program("promtool"), *map(str, arguments)]
    return subprocess.run(line, input=stdin, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)


def test_alerts_have_runbooks_fire_when_they_must_and_the_dashboard_can_be_queried(tmp_path: Path) -> None:
    # Each alert has its runbook and each runbook its alert.
    assert headings("docs/alerts.md") == [alert["alert"] for alert in ALERTS]

    # Each alert fires when it must and not before: the cases are for Prometheus itself to judge.
    done = promtool("test", "rules", CASES)
    assert done.returncode == 0, done.stdout + done.stderr

    # Prometheus parses every query of the dashboard: recording rules with values for the variables.
    queries = [target["expr"] for panel in PANELS for target in panel["targets"]]
    rules = [
        {"record": f"panel:{number}", "expr": query.replace("$__rate_interval", "5m")}
        for number, query in enumerate(queries)
    ]
    path = tmp_path / "queries.yml"
    path.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": rules}]}))
    done = promtool("check", "rules", path)
    assert done.returncode == 0, done.stdout + done.stderr


def test_texts_of_alerts_can_be_filled_in(tmp_path: Path) -> None:
    """promtool prints each alert that fires unexpectedly."""
    cases = yaml.safe_load(CASES.read_text())
    cases["rule_files"] = [str(RULES)]
    for case in cases["tests"]:
        moment = case.pop("promql_expr_test")[1]["eval_time"]
        case["alert_rule_test"] = [{"alertname": case["name"], "eval_time": moment}]
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(cases))
    done = promtool("test", "rules", tmp_path / "cases.yml")
    printed = done.stdout + done.stderr

    assert len(re.findall(r"alertname=", printed)) >= len(ALERTS)
    assert re.findall(r"error expanding|no value|NaN|%!", printed) == []


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Return the metrics of a daemon and its sidecars on a log with everything in it, by program."""
    root = tmp_path_factory.mktemp("exported") / "log"
    built = Built(root, now_ns=time.time_ns() - 86_400 * 10**9)  # old enough for its growth to be known
    for route in ("a", "b", "unread"):
        built.lines(route, [b"x"])
        built.cut()
    built.seal()
    run(sidecar("archive", "pack", "a", "--root", root))
    addresses = [free_address() for _ in range(4)]
    settings = root.parent / "wald.toml"
    settings.write_text("[routes.unread]\npinned_max_bytes = 1\n")
    certificate = root.parent / "gate.pem"
    making = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=gate", "-addext"]
    making += ["subjectAltName=IP:127.0.0.1", "-keyout", str(certificate), "-out", str(certificate)]
    subprocess.run(making, check=True, capture_output=True)
    with Daemon(root, "--config", settings, env={"WALD_METRICS": addresses[0]}):
        output_of("verify", "--record", "--root", root)
        options = ("--root", root, "--metrics")
        lines = (
            sidecar("reclaim", "--watch", "--grace", "0s", *options, addresses[1]),
            sidecar("drain", "feed", *options, addresses[2], "b", "--", "true"),
            sidecar("gate", "--root", root, "--listen", addresses[3], "--certificate", certificate),
        )
        beside = [launched(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) for line in lines]
        try:
            wanted = (
                "wald_last_reclaim_timestamp",
                "wald_reclaim_last_pass_timestamp",
                "wald_drain_last_success",
                "wald_gate",
            )
            origins = [*(f"http://{address}" for address in addresses[:3]), f"https://{addresses[3]}"]
            for origin, name in zip(origins, wanted, strict=True):
                eventually(lambda origin=origin, name=name: name in scraped(origin, certificate))  # type: ignore[misc]
            yield {name: scraped(origin, certificate) for name, origin in zip(PROGRAMS, origins, strict=True)}
        finally:
            for process in beside:
                process.terminate()
                process.wait(TIMEOUT_SECONDS)


def scraped(origin: str, certificate: Path) -> str:
    """The text of ``/metrics``; nothing before the program listens."""
    trusting = ssl.create_default_context(cafile=certificate) if origin.startswith("https") else None
    try:
        with urllib.request.urlopen(f"{origin}/metrics", timeout=TIMEOUT_SECONDS, context=trusting) as answer:
            text: str = answer.read().decode()
    except OSError:
        return ""
    return text


def test_what_programs_export_is_faultless_and_has_every_metric_that_a_query_names(exported: dict[str, str]) -> None:
    # Promtool finds no fault with what a program exports.
    for text in exported.values():
        done = promtool("check", "metrics", stdin=text)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    # Every metric that a query names is exported.
    names = {name for text in exported.values() for name in re.findall(r"^(wald_\w+)[ {]", text, re.MULTILINE)}
    assert {name for query in QUERIES for name in NAME.findall(query)} - names == set()
