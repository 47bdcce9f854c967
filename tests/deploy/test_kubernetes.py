"""The manifests in k8s/: mistakes that a cluster would refuse, or accept and run differently."""

import importlib
import itertools
import json
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import click
import kubernetes_validate
import pytest
from kustomize import OVERLAYS, Object, containers, of_kind, pods, rendered

from wald.settings import load

ROOT = Path(__file__).parents[2]
PROGRAMS: dict[str, str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
VERSIONS = ("1.29", "1.37")  # native sidecars are enabled since 1.29
CALL = re.compile(r"(?:^|;|&|\bexec|\bdo|\bthen)\s*(wald[a-z-]* [^&;|\n]+)", re.MULTILINE)
STOP_SECONDS = {"application": 30, "drain": 60, "gate": 15, "hold": 2}
STOP_SECONDS |= dict.fromkeys(("archive", "log", "reclaim", "wald"), 10)
METRICS = ["metrics", "metrics-reclaim", "metrics-drain"]
POD_SECURITY = {
    "fsGroup": 10001,
    "fsGroupChangePolicy": "OnRootMismatch",
    "runAsGroup": 10001,
    "runAsNonRoot": True,
    "runAsUser": 10001,
    "seccompProfile": {"type": "RuntimeDefault"},
}
CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
}
VOLUMES = {"configMap", "emptyDir", "name", "persistentVolumeClaim", "secret"}

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@every_overlay
def test_the_schemas_accept_every_object_and_settings_are_settings(overlay: str, tmp_path: Path) -> None:
    # The published schemas accept every object.
    for version in VERSIONS:
        for each in rendered(overlay):
            kubernetes_validate.validate(each, version, strict=True)

    # Settings are settings.
    (settings,) = of_kind(overlay, "ConfigMap")
    path = tmp_path / "wald.toml"
    path.write_text(settings["data"]["wald.toml"])
    config = load(path, {})
    assert set(settings["data"]) == {"wald.toml"}
    assert config.metrics.endswith(":9464")
    assert config.routes["access"].fifo


def calls(container: Object) -> Iterator[list[str]]:
    """Every call of a program of ours in a container, with its arguments."""
    commands = [container["command"]]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        commands += [container[probe]["exec"]["command"]] if "exec" in container.get(probe, {}) else []
    for words in commands:
        if words[0] in PROGRAMS:
            yield words
        elif words[:2] == ["sh", "-c"]:
            for line in CALL.findall(words[2]):
                yield list(itertools.chain(*(words[4:] if word == "$@" else [word] for word in shlex.split(line))))


def parse(program: str, arguments: list[str]) -> None:
    """Let click parse a complete command line without running it."""
    module = importlib.import_module(PROGRAMS[program].partition(":")[0])
    command: click.Command = module.cli if program == "wald" else module.command
    context = command.make_context(program, list(arguments))
    while isinstance(context.command, click.Group):
        name, inner, rest = context.command.resolve_command(context, [*context._protected_args, *context.args])
        assert inner is not None
        context = inner.make_context(name, rest, parent=context)


@every_overlay
def test_our_programs_accept_every_command_line(overlay: str, monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()
    for _, template in pods(overlay):
        for container in containers(template):
            with monkeypatch.context() as environment:
                for each in container.get("env", ()):
                    environment.setenv(each["name"], each["value"])
                for program, *arguments in calls(container):
                    called.add(program)
                    parse(program, arguments)

    assert called == {"wald", "wald-reclaim"} | ({"wald-drain"} if overlay != "node" else set()) | (
        {"wald-archive"} if overlay != "pod" else set()
    ) | ({"wald-gate"} if overlay == "gate" else set())


@every_overlay
def test_pods_have_their_volumes_time_to_stop_the_restricted_profile_and_bounds(overlay: str) -> None:
    # Every mount has its volume and every volume its claim.
    claims = {each["metadata"]["name"] for each in of_kind(overlay, "PersistentVolumeClaim")}
    maps = {each["metadata"]["name"] for each in of_kind(overlay, "ConfigMap")}
    for name, template in pods(overlay):
        volumes = {each["name"]: each for each in template["spec"]["volumes"]}
        templates = {
            each["metadata"]["name"]
            for owner in of_kind(overlay, "StatefulSet")
            if name.startswith("StatefulSet")
            for each in owner["spec"].get("volumeClaimTemplates", ())
        }
        mounted = {mount["name"] for container in containers(template) for mount in container["volumeMounts"]}
        assert mounted == volumes.keys() | templates
        assert volumes.keys() & templates == set()
        assert {
            each["persistentVolumeClaim"]["claimName"] for each in volumes.values() if "persistentVolumeClaim" in each
        } <= claims
        assert {each["configMap"]["name"] for each in volumes.values() if "configMap" in each} <= maps

    # Native sidecars start before what needs them and end after it.
    for name, template in pods(overlay):
        if name == "StatefulSet wald":
            sidecars = template["spec"]["initContainers"]
            assert [each["name"] for each in sidecars][-2:] == ["wald", "hold"]
            assert {each["restartPolicy"] for each in sidecars} == {"Always"}
            assert "startupProbe" in sidecars[-2]

    # There is time for the longest stop.
    for name, template in pods(overlay):
        spec = template["spec"]
        hooks = [
            each["lifecycle"]["preStop"]["exec"]["command"] for each in containers(template) if "lifecycle" in each
        ]
        longest = max((int(seconds) for _, seconds in hooks), default=0)
        together = max(STOP_SECONDS[each["name"]] for each in spec["containers"])
        one_by_one = sum(STOP_SECONDS[each["name"]] for each in spec.get("initContainers", ()))
        assert longest + together + one_by_one <= spec["terminationGracePeriodSeconds"], name

    # Pods keep the restricted profile and have bounds.
    for name, template in pods(overlay):
        spec = template["spec"]
        assert spec["enableServiceLinks"] is False, name
        assert spec["automountServiceAccountToken"] is False, name
        assert spec["securityContext"] == POD_SECURITY, name
        assert [field for field in spec if field.startswith("host")] == [], name
        assert {kind for volume in spec["volumes"] for kind in volume} <= VOLUMES, name
        for each in containers(template):
            security = dict(each["securityContext"])
            assert security.pop("runAsUser", 10001) in (10001, 10002), each["name"]
            assert security == CONTAINER_SECURITY, each["name"]
            assert all(port.keys() == {"containerPort", "name"} for port in each.get("ports", ())), each["name"]
            assert '"host"' not in json.dumps(each), each["name"]
            assert each["resources"]["requests"].keys() == {"cpu", "memory"}, each["name"]
            assert each["resources"]["limits"].keys() == {"memory"}, each["name"]


@every_overlay
def test_there_is_one_writer_and_what_surrounds_a_pod_selects_it(overlay: str) -> None:
    # There is one writer.
    (daemon,) = of_kind(overlay, "StatefulSet")
    writers = [
        name
        for name, template in pods(overlay)
        for each in containers(template)
        if each["command"][:2] == ["wald", "run"]
    ]
    assert daemon["spec"]["replicas"] == 1
    assert writers == ["StatefulSet wald"]
    assert {job["spec"]["concurrencyPolicy"] for job in of_kind(overlay, "CronJob")} <= {"Forbid"}

    # What surrounds a pod selects it.
    labels = {name: template["metadata"]["labels"] for name, template in pods(overlay)}
    (budget,), (policy,) = (of_kind(overlay, kind) for kind in ("PodDisruptionBudget", "NetworkPolicy"))
    services = of_kind(overlay, "Service")
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels["StatefulSet wald"].items()
    for each in services:
        assert each["spec"]["selector"].items() <= labels["StatefulSet wald"].items()
    for each in labels.values():
        assert policy["spec"]["podSelector"]["matchLabels"].items() <= each.items()
    ports = {
        port["name"] for _, template in pods(overlay) for each in containers(template) for port in each.get("ports", ())
    }
    assert "metrics" in ports
    measured = [{"port": name} for name in sorted(ports - {"gate"}, key=METRICS.index)]
    gate = [{"ports": [{"port": "gate"}], "from": [{"podSelector": {}}]}] if overlay == "gate" else []
    assert policy["spec"]["ingress"] == [{"ports": measured}, *gate]
    assert {port["targetPort"] for each in services for port in each["spec"]["ports"]} == ports
    assert ("Egress" in policy["spec"]["policyTypes"]) == (overlay == "node"), "an application's own traffic is its own"


@pytest.mark.parametrize("overlay", ["gate", "single"])
def test_a_claim_of_one_pod_is_mounted_by_one_pod(overlay: str) -> None:
    """ReadWriteOncePod would leave the pod of a CronJob waiting forever."""
    (daemon,) = of_kind(overlay, "StatefulSet")

    assert [claim["spec"]["accessModes"] for claim in daemon["spec"]["volumeClaimTemplates"]] == [
        ["ReadWriteOncePod"]
    ] * 2
    assert [name for name, _ in pods(overlay)] == ["StatefulSet wald"]
