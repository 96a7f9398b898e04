"""What `kubectl apply -k` would apply, of kustomizations as plain as ours: a reader, and no second kustomize.

It knows `resources`, `namespace`, `images`, `configMapGenerator` (without the hash in the name) and `patches` by path,
and fails on anything else. A patch's maps are merged and its lists replace, so one with a list that kustomize merges by
name is refused.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

Manifest = dict[str, Any]

_KNOWN = {"apiVersion", "kind", "namespace", "resources", "images", "configMapGenerator", "patches"}
_MERGED_BY_NAME = {"containers", "initContainers", "env", "volumes", "volumeMounts", "ports", "tolerations"}
_WITHOUT_NAMESPACE = {"Namespace"}


def documents(path: Path) -> list[Manifest]:
    return [each for each in yaml.safe_load_all(path.read_text()) if each is not None]


def build(folder: Path) -> list[Manifest]:
    """Every object of the kustomization in this folder."""
    [kustomization] = documents(folder / "kustomization.yaml")
    unknown = set(kustomization) - _KNOWN
    assert not unknown, f"{folder}: this reader does not know {unknown}"
    objects: list[Manifest] = []
    for resource in kustomization.get("resources", ()):
        path = folder / resource
        objects += build(path) if path.is_dir() else documents(path)
    for generator in kustomization.get("configMapGenerator", ()):
        _generate(objects, generator, folder)
    for patch in kustomization.get("patches", ()):
        assert patch.keys() == {"path"}
        for document in documents(folder / patch["path"]):
            _merge(_only(objects, document["kind"], document["metadata"]["name"]), document, patch["path"])
    for image in kustomization.get("images", ()):
        _rename_image(objects, image)
    for each in objects:
        if each["kind"] not in _WITHOUT_NAMESPACE:
            each["metadata"]["namespace"] = kustomization["namespace"]
    return objects


def pod_of(manifest: Manifest) -> Manifest | None:
    """The pod's spec of what makes pods."""
    template = manifest.get("spec", {}).get("template")
    return template["spec"] if template else None


def _generate(objects: list[Manifest], generator: dict[str, Any], folder: Path) -> None:
    assert generator.keys() <= {"name", "behavior", "envs", "files"}
    data = {name: (folder / name).read_text() for name in generator.get("files", ())}
    for name in generator.get("envs", ()):
        lines = [line for line in (folder / name).read_text().splitlines() if line and not line.startswith("#")]
        data |= dict(line.split("=", 1) for line in lines)
    behavior = generator.get("behavior", "create")
    if behavior == "create":
        objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": generator["name"]}, "data": data})
        return
    found = _only(objects, "ConfigMap", generator["name"])
    found["data"] = {"merge": found["data"] | data, "replace": data}[behavior]


def _rename_image(objects: list[Manifest], image: dict[str, str]) -> None:
    for container in (each for o in objects if (pod := pod_of(o)) for each in pod["containers"]):
        if container["image"] == image["name"]:
            container["image"] = f"{image['newName']}:{image['newTag']}"


def _merge(into: Any, patch: Any, where: str) -> None:
    for name, value in patch.items():
        assert name not in _MERGED_BY_NAME, f"{where}: kustomize merges {name} by name"
        if isinstance(value, dict) and isinstance(into.get(name), dict):
            _merge(into[name], value, where)
        else:
            into[name] = copy.deepcopy(value)


def _only(objects: list[Manifest], kind: str, name: str) -> Manifest:
    [found] = [each for each in objects if each["kind"] == kind and each["metadata"]["name"] == name]
    return found
