"""`kubectl kustomize` of deploy/kubernetes and of the overlay in its docs. It needs no cluster."""

import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

from benchmarks.acceptance.fleet.routing_proxies import FLEET
from tests.support.crds import schemas_of
from tests.support.kustomizations import FOLDER, named_resources, write_overlay

pytestmark = pytest.mark.fleet
KUBECTL = FLEET / "bin" / "kubectl"


def built(folder: Path) -> list[dict[str, Any]]:
    """Build the resources of a kustomization, and validate each strictly."""
    if not KUBECTL.exists():
        pytest.skip(f"there is no {KUBECTL}; 'make fleet' installs it.")
    done = subprocess.run([KUBECTL, "kustomize", folder], capture_output=True, text=True, check=False, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    resources = list(yaml.safe_load_all(done.stdout))
    for resource in resources:
        if resource["kind"] == "ScaledObject":
            (schema,) = schemas_of(resource)
            jsonschema.validate(resource, schema)
        else:
            kubernetes_validate.validate(resource, "1.37", strict=True)
    return resources


def names_of(resources: list[dict[str, Any]]) -> set[tuple[str, str]]:
    return {(one["kind"], one["metadata"]["name"]) for one in resources}


def test_the_base_is_built() -> None:
    assert names_of(built(FOLDER)) == named_resources(FOLDER)


def test_the_overlay_of_the_docs_is_built(tmp_path: Path) -> None:
    overlay = write_overlay(tmp_path)
    resources = built(overlay)
    assert names_of(resources) == named_resources(overlay)
    deployment = next(one for one in resources if one["kind"] == "Deployment")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert deployment["spec"]["replicas"] == 3
    assert container["image"] == "registry.example/team/penstock:cuda"
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["args"][:3] == ["serve", "--models", "/models"]
    assert {one["metadata"]["namespace"] for one in resources} == {"default"}
