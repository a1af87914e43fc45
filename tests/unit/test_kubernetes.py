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
from tests.support.crds import reduced, schemas_of
from tests.support.kustomizations import BASE, NAME, OVERLAY, named_resources, write_overlay

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


@pytest.mark.thorough
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


CUSTOM = [SCALED, RUNTIME, TRAINING, JOB]


@pytest.mark.parametrize("resource", CUSTOM, ids=lambda one: one["kind"])
def test_the_definitions_of_custom_resources_take_each(resource: dict[str, Any]) -> None:
    (schema,) = schemas_of(resource)
    jsonschema.validate(resource, schema)


@pytest.mark.parametrize("resource", CUSTOM, ids=lambda one: one["kind"])
def test_the_definitions_of_a_cluster_take_each_custom_resource(resource: dict[str, Any]) -> None:
    folder = os.environ.get("PENSTOCK_CRDS")
    if not folder:
        pytest.skip("PENSTOCK_CRDS names no folder of CRDs of a cluster, beside those of tests/data/crds")
    schemas = list(schemas_of(resource, Path(folder)))
    if not schemas:
        pytest.skip(f"{folder} has no {resource['kind']}")
    for schema in schemas:
        jsonschema.validate(resource, schema)


@pytest.mark.thorough
def test_a_misspelt_field_of_a_custom_resource_would_be_seen() -> None:
    pod = TRAINING["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    places = [
        (SCALED, SCALED["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]["scaleUp"]),
        (RUNTIME, RUNTIME["spec"]["containers"][0]["readinessProbe"]),
        (TRAINING, pod["containers"][0]["securityContext"]),
        (JOB, JOB["spec"]["trainer"]),
    ]
    for resource, place in places:
        (schema,) = schemas_of(resource)
        place["misspelt"] = 1
        try:
            with pytest.raises(jsonschema.ValidationError, match="'misspelt' was unexpected"):
                jsonschema.validate(resource, schema)
        finally:
            del place["misspelt"]


def test_definitions_are_kept_without_their_descriptions() -> None:
    schema = {"description": "all", "properties": {"description": {"type": "string", "description": "of a field"}}}
    versions = [{"name": "v1", "served": True, "schema": {"openAPIV3Schema": schema}}]
    names = {"kind": "Thing", "plural": "things"}
    kept = reduced({"metadata": {}, "spec": {"group": "example.org", "names": names, "versions": versions}})["spec"]
    assert kept["names"] == {"kind": "Thing"}
    (version,) = kept["versions"]
    assert version["schema"]["openAPIV3Schema"] == {"properties": {"description": {"type": "string"}}}


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


def test_the_base_has_every_resource_that_needs_no_definitions() -> None:
    base = yaml.safe_load((FOLDER / NAME).read_text())
    assert set(base["resources"]) == {"penstock.yaml"}
    others = {file.name for file in FOLDER.glob("*.yaml")} - {NAME, *base["resources"]}
    for name in others - {"gpu.yaml"}:
        kinds = {one["apiVersion"] for one in yaml.safe_load_all((FOLDER / name).read_text())}
        # A cluster without these would refuse the whole base.
        assert kinds <= {"keda.sh/v1alpha1", "serving.kserve.io/v1alpha1", "trainer.kubeflow.org/v1alpha1"}, name
    keys = [(one["kind"], one["metadata"]["name"]) for one in RESOURCES]
    assert len(keys) == len(set(keys))


def test_the_overlay_of_the_docs_names_what_is_there(tmp_path: Path) -> None:
    overlay = write_overlay(tmp_path)
    made = yaml.safe_load((overlay / NAME).read_text())
    assert BASE in made["resources"]
    names = named_resources(overlay)
    for patch in made["patches"]:
        assert (overlay / patch["path"]).is_file()
        assert (patch["target"]["kind"], patch["target"]["name"]) in names
    for replicas in made["replicas"]:
        assert ("Deployment", replicas["name"]) in names
    (image,) = made["images"]
    assert CONTAINER["image"].rpartition(":")[0] == image["name"]
    assert ("ScaledObject", SCALED["metadata"]["name"]) in names
    assert f"kubectl apply --kustomize {OVERLAY}" in (ROOT / "docs" / "how-to" / "kubernetes.md").read_text()
