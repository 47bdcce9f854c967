"""The manifests in k8s/ as a cluster gets them: rendered by any version of kubectl.

Debian's kubectl has kustomize 2, which names two fields differently: directories among the resources are bases, and
patches are listed by their kind. The kustomizations are rewritten for that version; everything else is the same.
"""

import functools
import json
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import programs
import yaml

MANIFESTS = Path(__file__).parents[2] / "k8s"
OVERLAYS = ("gate", "node", "pod", "single")
Object = dict[str, Any]  # as YAML has it; the published schemas say more


@functools.cache
def rendered(overlay: str) -> tuple[Object, ...]:
    """Return the objects of an overlay."""
    kubectl = programs.program("kubectl")
    with tempfile.TemporaryDirectory() as directory:
        manifests = MANIFESTS
        if _is_old(kubectl):
            manifests = Path(directory) / "k8s"
            shutil.copytree(MANIFESTS, manifests)
            for path in manifests.rglob("kustomization.yaml"):
                path.write_text(yaml.safe_dump(_for_kustomize_2(yaml.safe_load(path.read_text()), path.parent)))
        line = [kubectl, "kustomize", str(manifests / "overlays" / overlay)]
        done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return tuple(yaml.safe_load_all(done.stdout))


def of_kind(overlay: str, kind: str) -> list[Object]:
    return [each for each in rendered(overlay) if each["kind"] == kind]


def pods(overlay: str) -> Iterator[tuple[str, Object]]:
    """Yield name and template of every pod in an overlay."""
    for each in rendered(overlay):
        name = f"{each['kind']} {each['metadata']['name']}"
        if each["kind"] == "StatefulSet":
            yield name, each["spec"]["template"]
        elif each["kind"] == "CronJob":
            yield name, each["spec"]["jobTemplate"]["spec"]["template"]


def containers(template: Object) -> list[Object]:
    """Return the containers of a pod, in the order of their start."""
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def _is_old(kubectl: str) -> bool:
    done = subprocess.run([kubectl, "version", "--client", "--output=json"], capture_output=True, check=True)
    return "kustomizeVersion" not in json.loads(done.stdout)


def _for_kustomize_2(kustomization: Object, directory: Path) -> Object:
    resources, patches = kustomization.pop("resources"), kustomization.pop("patches", [])
    bases = [name for name in resources if (directory / name).is_dir()]
    return kustomization | {
        "bases": bases,
        "resources": [name for name in resources if name not in bases],
        "patchesStrategicMerge": [patch["path"] for patch in patches if "target" not in patch],
        "patchesJson6902": [patch for patch in patches if "target" in patch],
    }
