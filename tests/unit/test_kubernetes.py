"""deploy/kubernetes against Kubernetes' schemas, the command, the image and the server."""

import os
import re
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import typer.main
import yaml
from kubeflow_trainer_api import models

from penstock.cli import build
from penstock.serve.observe import metrics
from penstock.serve.observe.load_report import LoadReport
from penstock.train.parallel.rank_assignment import rank_assignment

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "kubernetes"
IMAGE = (ROOT / "Dockerfile").read_text()
RESOURCES: list[dict[str, Any]] = list(yaml.safe_load_all((FOLDER / "penstock.yaml").read_text()))
DEPLOYMENT = next(one for one in RESOURCES if one["kind"] == "Deployment")
(SCALED,) = yaml.safe_load_all((FOLDER / "autoscale.yaml").read_text())
(RUNTIME,) = yaml.safe_load_all((FOLDER / "kserve.yaml").read_text())
TRAINING, JOB = yaml.safe_load_all((FOLDER / "train.yaml").read_text())
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


def strict(schema: Any) -> Any:
    """A schema of a custom resource that takes no field it does not name, as `kubectl --validate=strict`."""
    if isinstance(schema, list):
        return [strict(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: strict(each) for name, each in schema.items()}
    if "properties" in made and not made.get("x-kubernetes-preserve-unknown-fields"):
        made.setdefault("additionalProperties", False)
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
    return made


@pytest.mark.parametrize("resource", [SCALED, RUNTIME, TRAINING, JOB], ids=lambda one: one["kind"])
def test_the_definitions_of_a_cluster_take_each_custom_resource(resource: dict[str, Any]) -> None:
    folder = os.environ.get("PENSTOCK_CRDS")
    if not folder:
        pytest.skip("PENSTOCK_CRDS names no folder of CRDs")
    checked = 0
    for path in sorted(Path(folder).glob("*.yaml")):
        spec = yaml.safe_load(path.read_text())["spec"]
        for version in spec["versions"]:
            if (f"{spec['group']}/{version['name']}", spec["names"]["kind"]) == (
                resource["apiVersion"],
                resource["kind"],
            ):
                schema = strict(version["schema"]["openAPIV3Schema"])
                schema["properties"]["metadata"] = {"type": "object"}
                jsonschema.validate(resource, schema)
                checked += 1
    if not checked:
        pytest.skip(f"{folder} has no {resource['kind']}")


@pytest.mark.parametrize(
    ("resource", "kind"),
    [(TRAINING, models.TrainerV1alpha1TrainingRuntime), (JOB, models.TrainerV1alpha1TrainJob)],
    ids=["runtime", "job"],
)
def test_kubeflow_knows_every_field_of_the_training(resource: dict[str, Any], kind: Any) -> None:
    # What it does not know is lost on the way.
    assert kind.from_dict(resource).to_dict() == resource
    wrong = resource | {"spec": resource["spec"] | {"misspelt": 1}}
    assert kind.from_dict(wrong).to_dict() != wrong


@pytest.mark.parametrize(
    "pod",
    [
        {"containers": RUNTIME["spec"]["containers"], "volumes": RUNTIME["spec"]["volumes"]},
        TRAINING["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"],
    ],
    ids=["kserve", "training"],
)
def test_kubernetes_takes_the_pods_of_the_custom_resources(pod: dict[str, Any]) -> None:
    resource = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "penstock"}, "spec": pod}
    kubernetes_validate.validate(resource, "1.37", strict=True)
    mounts = {mount["name"] for mount in pod["containers"][0]["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}


def test_the_scaler_asks_for_a_metric_that_the_server_has() -> None:
    assert SCALED["spec"]["scaleTargetRef"]["name"] == DEPLOYMENT["metadata"]["name"]
    (trigger,) = SCALED["spec"]["triggers"]
    (metric,) = re.findall(r"penstock_\w+", trigger["metadata"]["query"])
    text = metrics.exposition([], LoadReport(utilisation=1.25, finish_ms=40.0)).decode()
    assert re.findall(rf"^{metric} (.*)$", text, re.MULTILINE) == ["1.25"]
    assert "penstock_predicted_finish_seconds 0.04" in text
    assert SCALED["spec"]["minReplicaCount"] == DEPLOYMENT["spec"]["replicas"]


def test_kserve_starts_the_server_on_the_ports_that_it_probes() -> None:
    (container,) = RUNTIME["spec"]["containers"]
    command, *arguments = container["args"]
    commands: Any = typer.main.get_command(build())
    parsed = commands.commands[command].make_context(command, list(arguments)).params
    probes = {container[probe]["httpGet"]["port"] for probe in ("livenessProbe", "readinessProbe")}
    assert probes == {parsed["port"], *(port["containerPort"] for port in container["ports"])}
    assert RUNTIME["spec"]["annotations"]["prometheus.kserve.io/port"] == str(parsed["port"])


def test_the_training_starts_a_command_whose_ranks_are_known() -> None:
    torchrun, _, command, *arguments = JOB["spec"]["trainer"]["command"]
    assert (torchrun, command) == ("torchrun", "penstock")
    commands: Any = typer.main.get_command(build())
    name, *rest = arguments
    assert str(commands.commands[name].make_context(name, list(rest)).params["out"]) == "/runs/app"
    # What torchrun sets in the sixth process of these.
    trainer = JOB["spec"]["trainer"]
    each, size = trainer["numProcPerNode"], trainer["numNodes"] * trainer["numProcPerNode"]
    environment = {"RANK": "5", "WORLD_SIZE": str(size), "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": str(each)}
    ranks = rank_assignment(environment | {"MASTER_ADDR": "node-0", "MASTER_PORT": "29500"})
    assert ranks is not None
    assert (ranks.rank, ranks.local_rank, ranks.size) == (5, 1, size)
    assert str(each) == trainer["resourcesPerNode"]["limits"]["nvidia.com/gpu"]
    assert trainer["numNodes"] == TRAINING["spec"]["mlPolicy"]["numNodes"]
