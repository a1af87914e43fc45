"""deploy/kubernetes against Kubernetes' schemas, the command, the image and the server."""

import re
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import typer.main
import yaml

from penstock.cli import build

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
IMAGE = (ROOT / "Dockerfile").read_text()
RESOURCES: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "penstock.yaml").read_text()))
DEPLOYMENT = next(one for one in RESOURCES if one["kind"] == "Deployment")
POD = DEPLOYMENT["spec"]["template"]["spec"]
(CONTAINER,) = POD["containers"]


def patched() -> dict[str, Any]:
    """The deployment with the patch for GPUs, merged as `kubectl patch` merges it: containers by name."""

    def merge(whole: Any, patch: Any) -> Any:
        if isinstance(patch, dict):
            return whole | {name: merge(whole.get(name, {}), value) for name, value in patch.items()}
        if isinstance(patch, list) and all(isinstance(one, dict) for one in patch):
            by_name = {one["name"]: one for one in patch}
            return [merge(one, by_name.get(one["name"], {})) for one in whole]
        return patch

    return merge(DEPLOYMENT, yaml.safe_load((FOLDER / "gpu.yaml").read_text()))


@pytest.mark.parametrize("resource", [*RESOURCES, patched()], ids=lambda one: one["kind"])
@pytest.mark.parametrize("version", ["1.30", "1.37"])
def test_kubernetes_takes_each_resource(resource: dict[str, Any], version: str) -> None:
    kubernetes_validate.validate(resource, version, strict=True)


def test_a_misspelt_field_would_be_seen() -> None:
    wrong = DEPLOYMENT | {"spec": DEPLOYMENT["spec"] | {"replica": 2}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, "1.37", strict=True)


def test_the_patch_takes_a_gpu_and_keeps_the_rest() -> None:
    (container,) = patched()["spec"]["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    assert container["image"].endswith(":cuda")
    assert container["args"] == CONTAINER["args"]


def test_the_arguments_are_read_as_they_are_meant() -> None:
    command, *arguments = CONTAINER["args"]
    commands: Any = typer.main.get_command(build())
    parsed = commands.commands[command].make_context(command, list(arguments)).params
    ports = {port["name"]: port["containerPort"] for port in CONTAINER["ports"]}
    assert (parsed["host"], parsed["port"], parsed["grpc_port"]) == ("0.0.0.0", ports["http"], ports["grpc"])
    mounts = {mount["mountPath"] for mount in CONTAINER["volumeMounts"]}
    assert str(parsed["directory"]) in mounts
    # The sleep and the drain end before SIGKILL.
    sleep_s = CONTAINER["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert POD["terminationGracePeriodSeconds"] >= sleep_s + parsed["drain_timeout_s"] + 5


def test_the_pod_fits_the_image() -> None:
    ports = {str(port["containerPort"]) for port in CONTAINER["ports"]}
    assert ports == set(re.findall(r"^EXPOSE (.+)$", IMAGE, re.MULTILINE)[0].split())
    user = re.findall(r"^USER (\d+):(\d+)$", IMAGE, re.MULTILINE)[0]
    security = POD["securityContext"]
    assert (str(security["runAsUser"]), str(security["runAsGroup"])) == user
    cache = re.findall(r"PENSTOCK_CACHE=(\S+)", IMAGE)[0]
    mounts = {mount["mountPath"]: mount for mount in CONTAINER["volumeMounts"]}
    # The root is read-only: all that is written has a volume.
    assert {cache, "/tmp"} <= mounts.keys()
    assert not mounts[cache].get("readOnly")


def test_every_volume_and_port_is_there() -> None:
    volumes = {volume["name"]: volume for volume in POD["volumes"]}
    assert {mount["name"] for mount in CONTAINER["volumeMounts"]} == volumes.keys()
    claims = {one["metadata"]["name"] for one in RESOURCES if one["kind"] == "PersistentVolumeClaim"}
    named = {volume["persistentVolumeClaim"]["claimName"] for volume in volumes.values() if "emptyDir" not in volume}
    assert named == claims
    service = next(one for one in RESOURCES if one["kind"] == "Service")
    assert {port["targetPort"] for port in service["spec"]["ports"]} == {port["name"] for port in CONTAINER["ports"]}
    labels = DEPLOYMENT["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"].items() <= labels.items()


def test_the_probes_are_routes_of_the_server() -> None:
    routes = (ROOT / "docs" / "reference" / "http.md").read_text()
    probes = {CONTAINER[name]["httpGet"]["path"] for name in ("livenessProbe", "readinessProbe")}
    assert probes == {"/v2/health/live", "/v2/health/ready"}
    assert all(f"`{path}`" in routes for path in probes)
    assert DEPLOYMENT["spec"]["template"]["metadata"]["annotations"]["prometheus.io/path"] == "/metrics"
