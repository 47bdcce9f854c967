"""The published Pod Security Standards, profile "restricted", rule by rule: every pod in k8s/ keeps each of them.

https://kubernetes.io/docs/concepts/security/pod-security-standards/ has the rules; those of the profile "baseline"
belong to it. A namespace that enforces the profile refuses a pod that breaks one.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from kustomize import OVERLAYS, Object, pods

CONTAINERS = ("containers", "initContainers", "ephemeralContainers")
LEVELS = ("securityContext", *(f"{each}[*].securityContext" for each in CONTAINERS))
SAFE_SYSCTLS = {
    "kernel.shm_rmid_forced",
    "net.ipv4.ip_local_port_range",
    "net.ipv4.ip_local_reserved_ports",
    "net.ipv4.ip_unprivileged_port_start",
    "net.ipv4.ping_group_range",
    "net.ipv4.tcp_fin_timeout",
    "net.ipv4.tcp_keepalive_intvl",
    "net.ipv4.tcp_keepalive_probes",
    "net.ipv4.tcp_keepalive_time",
    "net.ipv4.tcp_rmem",
    "net.ipv4.tcp_syncookies",
    "net.ipv4.tcp_wmem",
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
ADDED = {
    "AUDIT_WRITE",
    "CHOWN",
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "KILL",
    "MKNOD",
    "NET_BIND_SERVICE",
    "SETFCAP",
    "SETGID",
    "SETPCAP",
    "SETUID",
    "SYS_CHROOT",
}
VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "name",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
Allowed = Callable[[Any], bool]


@dataclass(frozen=True)
class Rule:
    """One control.

    Attributes:
        fields: below the pod's spec; ``[*]`` stands for every element.
        allowed: whether a value is allowed; None is a field that is not there.
        violation: a field of a pod with one container, and a value of it that breaks the rule.
        inherits: the field of the pod that counts where a container does not have its own.
    """

    control: str
    fields: tuple[str, ...]
    allowed: Allowed
    violation: tuple[str, object]
    inherits: str = ""


def in_containers(field: str) -> tuple[str, ...]:
    return tuple(f"{each}[*].{field}" for each in CONTAINERS)


def at_every_level(field: str) -> tuple[str, ...]:
    return tuple(f"{each}.{field}" for each in LEVELS)


def one_of(*values: object) -> Allowed:
    return lambda value: value in values


FIRST = "containers[0]"
RULES = [
    # Baseline.
    Rule(
        "HostProcess",
        at_every_level("windowsOptions.hostProcess"),
        one_of(None, False),
        ("securityContext.windowsOptions", {"hostProcess": True}),
    ),
    Rule("Host network", ("hostNetwork",), one_of(None, False), ("hostNetwork", True)),
    Rule("Host PID", ("hostPID",), one_of(None, False), ("hostPID", True)),
    Rule("Host IPC", ("hostIPC",), one_of(None, False), ("hostIPC", True)),
    Rule(
        "Privileged containers",
        in_containers("securityContext.privileged"),
        one_of(None, False),
        (f"{FIRST}.securityContext.privileged", True),
    ),
    Rule(
        "Capabilities of baseline",
        in_containers("securityContext.capabilities.add"),
        lambda value: set(value or ()) <= ADDED,
        (f"{FIRST}.securityContext.capabilities.add", ["SYS_ADMIN"]),
    ),
    Rule(
        "HostPath volumes",
        ("volumes[*].hostPath",),
        one_of(None),
        ("volumes[0].hostPath", {"path": "/var/lib/wald"}),
    ),
    Rule(
        "Host ports",
        in_containers("ports[*].hostPort"),
        one_of(None, 0),
        (f"{FIRST}.ports", [{"containerPort": 9464, "hostPort": 9464}]),
    ),
    Rule(
        "Hosts of probes and hooks",
        tuple(
            field
            for probe in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle.postStart", "lifecycle.preStop")
            for ask in ("httpGet", "tcpSocket")
            for field in in_containers(f"{probe}.{ask}.host")
        ),
        one_of(None, ""),
        (f"{FIRST}.livenessProbe", {"httpGet": {"host": "192.0.2.1", "port": 80}}),
    ),
    Rule(
        "AppArmor",
        at_every_level("appArmorProfile.type"),
        one_of(None, "RuntimeDefault", "Localhost"),
        ("securityContext.appArmorProfile", {"type": "Unconfined"}),
    ),
    Rule(
        "SELinux type",
        at_every_level("seLinuxOptions.type"),
        lambda value: (value or "") in SELINUX_TYPES,
        ("securityContext.seLinuxOptions", {"type": "spc_t"}),
    ),
    Rule(
        "SELinux user and role",
        (*at_every_level("seLinuxOptions.user"), *at_every_level("seLinuxOptions.role")),
        one_of(None, ""),
        ("securityContext.seLinuxOptions", {"user": "system_u"}),
    ),
    Rule(
        "/proc mount type",
        in_containers("securityContext.procMount"),
        one_of(None, "Default"),
        (f"{FIRST}.securityContext.procMount", "Unmasked"),
    ),
    Rule(
        "Sysctls",
        ("securityContext.sysctls[*].name",),
        lambda value: value is None or value in SAFE_SYSCTLS,
        ("securityContext.sysctls", [{"name": "kernel.msgmax", "value": "1"}]),
    ),
    # Restricted.
    Rule(
        "Volume types",
        ("volumes[*]",),
        lambda value: value is None or set(value) <= VOLUMES,
        ("volumes[0].nfs", {"server": "files", "path": "/"}),
    ),
    Rule(
        "Privilege escalation",
        in_containers("securityContext.allowPrivilegeEscalation"),
        one_of(False),
        (f"{FIRST}.securityContext.allowPrivilegeEscalation", None),
    ),
    Rule(
        "Running as non-root",
        in_containers("securityContext.runAsNonRoot"),
        one_of(True),
        (f"{FIRST}.securityContext.runAsNonRoot", False),
        inherits="securityContext.runAsNonRoot",
    ),
    Rule(
        "Running as non-root user",
        at_every_level("runAsUser"),
        lambda value: value != 0,
        (f"{FIRST}.securityContext.runAsUser", 0),
    ),
    Rule(
        "Seccomp",
        in_containers("securityContext.seccompProfile.type"),
        one_of("RuntimeDefault", "Localhost"),
        (f"{FIRST}.securityContext.seccompProfile", {"type": "Unconfined"}),
        inherits="securityContext.seccompProfile.type",
    ),
    Rule(
        "Capabilities dropped",
        in_containers("securityContext.capabilities.drop"),
        lambda value: "ALL" in (value or ()),
        (f"{FIRST}.securityContext.capabilities.drop", ["NET_RAW"]),
    ),
    Rule(
        "Capabilities added",
        in_containers("securityContext.capabilities.add"),
        one_of(None, [], ["NET_BIND_SERVICE"]),
        (f"{FIRST}.securityContext.capabilities.add", ["CHOWN"]),
    ),
]
# A violation of these of baseline breaks a stricter rule of the restricted profile as well.
ALSO_BROKEN = {"HostPath volumes": {"Volume types"}, "Capabilities of baseline": {"Capabilities added"}}


def values(value: Any, path: str) -> Iterator[Any]:
    """Every value at a path; None for one that is not there, and nothing for elements that are not there."""
    name, _, rest = path.partition(".")
    key, every, _ = name.partition("[*]")
    found = (value or {}).get(key)
    for each in (found or ()) if every else (found,):
        if rest:
            yield from values(each, rest)
        else:
            yield each


def broken(spec: Object) -> set[str]:
    """The controls that a pod does not keep."""
    controls = set()
    for rule in RULES:
        (inherited,) = values(spec, rule.inherits) if rule.inherits else (None,)
        found = [inherited if value is None else value for field in rule.fields for value in values(spec, field)]
        if not all(map(rule.allowed, found)):
            controls.add(rule.control)
    return controls


def with_value(spec: Object, path: str, value: object) -> Object:
    """A copy of a pod in which a field has another value."""
    changed = place = copy.deepcopy(spec)
    *above, last = path.split(".")
    for name in above:
        key, element, _ = name.partition("[0]")
        place = place.setdefault(key, {})
        place = place[0] if element else place
    if last.endswith("[0]"):
        place, last = place[last.removesuffix("[0]")][0], ""
    place[last] = value
    return changed


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_pod_keeps_every_rule(overlay: str) -> None:
    assert {name: broken(template["spec"]) for name, template in pods(overlay)} == {
        name: set() for name, _ in pods(overlay)
    }


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.control)
def test_a_pod_that_breaks_a_rule_is_noticed(rule: Rule) -> None:
    _, template = next(pods("pod"))

    assert broken(with_value(template["spec"], *rule.violation)) == {rule.control} | ALSO_BROKEN.get(
        rule.control, set()
    )
