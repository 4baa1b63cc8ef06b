"""configs/k8s: every field is one that KubeRay has, every group is one that the planner uses, no secret is there.

The tables of fields are derived from the schema of `rayjobs.ray.io`, version v1, of KubeRay v1.7.0
(helm-chart/kuberay-operator/crds), and from Kubernetes' Service: for each object that the manifests write, the names
that the schema has there, and those that it requires. Pods' rarely used volume and scheduling fields are left out, so a
manifest that needs one adds it here after a look at the schema.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ByteSize, TypeAdapter

from tiermoe.actors.policies.sharding import owned_experts
from tiermoe.cluster.api.server_socket import DRAIN_S
from tiermoe.cluster.config import configs_dir, engine_settings, load_run_config
from tiermoe.cluster.topology.planner import plan_topology
from tiermoe.cluster.topology.spec import ModelFacts, NodeInfo, cluster_spec

sys.path.insert(0, str(Path(__file__).parents[1] / "install"))
from constraints import PYTHONS
from dockerfile import ROOT, STAGES, in_context, pip_step

_FIELDS = {
    "": "apiVersion kind metadata spec",
    "RayJob spec": "activeDeadlineSeconds backoffLimit clusterSelector deletionStrategy entrypoint entrypointNumCpus "
    "entrypointNumGpus entrypointResources jobId managedBy metadata preRunningDeadlineSeconds rayClusterSpec "
    "runtimeEnvYAML shutdownAfterJobFinishes submissionMode submitterConfig submitterPodTemplate suspend "
    "ttlSecondsAfterFinished",
    "Service spec": "ports selector sessionAffinity type",
    "spec.selector": "app",
    "spec.ports[]": "appProtocol name nodePort port protocol targetPort",
    "spec.rayClusterSpec": "authOptions autoscalerOptions enableInTreeAutoscaling gcsFaultToleranceOptions "
    "headGroupSpec headServiceAnnotations historyServerOptions managedBy networkPolicy rayVersion suspend tlsOptions "
    "upgradeStrategy workerGroupSpecs",
    "spec.rayClusterSpec.authOptions": "enableK8sTokenAuth mode secretName",
    "spec.rayClusterSpec.headGroupSpec": "enableIngress headService ingressOptions labels rayStartParams resources "
    "serviceType template",
    "spec.rayClusterSpec.workerGroupSpecs[]": "groupName idleTimeoutSeconds labels maxReplicas minReplicas numOfHosts "
    "priority rayStartParams replicas resources scaleStrategy suspend template",
    "template": "metadata spec",
    "template.spec": "affinity containers nodeSelector securityContext serviceAccountName "
    "terminationGracePeriodSeconds tolerations topologySpreadConstraints volumes",
    "template.spec.containers[].env[]": "name value valueFrom",
    "template.spec.containers[]": "args command env envFrom image imagePullPolicy lifecycle livenessProbe name ports "
    "readinessProbe resources securityContext startupProbe volumeDevices volumeMounts workingDir",
    "template.spec.containers[].ports[]": "containerPort hostIP hostPort name protocol",
    "template.spec.containers[].resources": "claims limits requests",
    "template.spec.containers[].lifecycle": "postStart preStop stopSignal",
    "template.spec.containers[].lifecycle.preStop": "exec httpGet sleep tcpSocket",
    "template.spec.containers[].lifecycle.preStop.exec": "command",
    "template.spec.containers[].lifecycle.preStop.sleep": "seconds",
    "template.spec.containers[].readinessProbe": "exec failureThreshold grpc httpGet initialDelaySeconds periodSeconds "
    "successThreshold tcpSocket terminationGracePeriodSeconds timeoutSeconds",
    "template.spec.containers[].readinessProbe.httpGet": "host httpHeaders path port scheme",
    "template.spec.containers[].volumeMounts[]": "mountPath mountPropagation name readOnly recursiveReadOnly subPath "
    "subPathExpr",
    "template.spec.volumes[]": "configMap emptyDir hostPath name nfs persistentVolumeClaim projected secret",
    "template.spec.volumes[].persistentVolumeClaim": "claimName readOnly",
}
_REQUIRED = {
    "Service spec": "ports selector",
    "spec.ports[]": "port",
    "template.spec.containers[].lifecycle.preStop.sleep": "seconds",
    "spec.rayClusterSpec": "headGroupSpec",
    "spec.rayClusterSpec.headGroupSpec": "template",
    "spec.rayClusterSpec.workerGroupSpecs[]": "groupName maxReplicas minReplicas template",
    "template.spec": "containers",
    "template.spec.containers[]": "name",
    "template.spec.containers[].ports[]": "containerPort",
    "template.spec.containers[].readinessProbe.httpGet": "port",
    "template.spec.containers[].volumeMounts[]": "mountPath name",
    "template.spec.volumes[]": "name",
    "template.spec.volumes[].persistentVolumeClaim": "claimName",
}
# Maps of free names to text (rayStartParams) or to quantities.
_FREE = ("metadata", "rayStartParams", "limits", "requests")
_INTEGERS = re.compile(r"(Seconds|seconds|Replicas|replicas|backoffLimit|Threshold|Port)$")
_MANIFESTS = sorted((configs_dir() / "k8s").glob("*.yaml"))
# Mixtral-8x7B: what the manifest's sizes were chosen for.
_MIXTRAL = ModelFacts("mixtral", 32, 8, 2, 4096, 14336, 2, 3 * 4096 * 14336, 1_605_000_000, 65536, 2, "test")


def _load(path: Path) -> dict[str, Any]:
    """The RayJob of a manifest."""
    return next(found for found in _documents(path) if found["kind"] == "RayJob")


def _documents(path: Path) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(path.read_text(encoding="utf-8")))


def _places(manifest: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """`_objects`, with the kinds' own fields in places of their own."""
    for place, value in _objects(manifest):
        yield f"{manifest['kind']} spec" if place == "spec" else place, value


def _objects(value: Any, path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every object of a manifest with its place; pods' places begin at their template, and all probes are one."""
    if isinstance(value, list):
        for item in value:
            yield from _objects(item, f"{path}[]")
    elif isinstance(value, dict) and path.rpartition(".")[2] not in _FREE:
        yield path, value
        for key, inner in value.items():
            name = "readinessProbe" if key == "livenessProbe" else key
            yield from _objects(inner, "template" if key == "template" else f"{path}.{name}".lstrip("."))


def _groups(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    return _cluster(manifest)["workerGroupSpecs"]


def _cluster(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["spec"]["rayClusterSpec"]


def _pods(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    head = _cluster(manifest)["headGroupSpec"]
    return [group["template"]["spec"] for group in (head, *_groups(manifest))]


@pytest.mark.parametrize("path", _MANIFESTS, ids=lambda path: path.name)
def test_every_field_is_in_the_schema(path: Path) -> None:
    documents = _documents(path)
    kinds = {"RayJob": "ray.io/v1", "Service": "v1"}
    assert all(document["apiVersion"] == kinds[document["kind"]] for document in documents)
    for place, value in (found for document in documents for found in _places(document)):
        assert place in _FIELDS, f"{place} is not in the tables of this test"
        assert set(value) <= set(_FIELDS[place].split()), place
        assert set(_REQUIRED.get(place, "").split()) <= set(value), place
        for name, inner in value.items():
            if _INTEGERS.search(name) and not isinstance(inner, dict | list):
                assert type(inner) is int, f"{place}.{name}"
    names = {key for document in documents for _, value in _objects(document) for key in value}
    assert not names & {"secretName", "secret", "envFrom", "secretKeyRef"}
    assert not re.search(r"(?i)(api_?key|password|auth_token)\s*[:=]", path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("path", _MANIFESTS, ids=lambda path: path.name)
def test_pods_have_requests_probes_and_time_to_drain(path: Path) -> None:
    manifest = _load(path)
    for pod in _pods(manifest):
        (container,) = pod["containers"]
        resources = container["resources"]
        assert resources["requests"] == resources["limits"]  # Ray takes its CPUs and memory from the limits
        assert {"cpu", "memory"} <= set(resources["limits"])
        assert {"readinessProbe", "livenessProbe"} <= set(container)
        assert pod["terminationGracePeriodSeconds"] >= 30
        assert not any("secret" in volume for volume in pod["volumes"])
        assert {mount["name"] for mount in container["volumeMounts"]} <= {volume["name"] for volume in pod["volumes"]}
    for group in _groups(manifest):
        pod = group["template"]["spec"]
        stop = pod["containers"][0]["lifecycle"]["preStop"]
        takes_s = stop["sleep"]["seconds"] if "sleep" in stop else int(stop["exec"]["command"][-1])
        assert takes_s < pod["terminationGracePeriodSeconds"]
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert all(isinstance(value, str) for value in group["rayStartParams"].values())  # the schema's type


@pytest.mark.parametrize("path", _MANIFESTS, ids=lambda path: path.name)
def test_images_are_those_of_the_dockerfile(path: Path) -> None:
    """Pods with a GPU take the target `cuda`, others `cpu`, in this version, with the Ray that the manifest names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    manifest = _load(path)
    for pod in _pods(manifest):
        (container,) = pod["containers"]
        target = "cuda" if "nvidia.com/gpu" in container["resources"]["limits"] else "cpu"
        assert target in STAGES
        assert container["image"].endswith(f"/tiermoe:{project['version']}-{target}")
    assert f"ray=={_cluster(manifest)['rayVersion']}\n" in (ROOT / "constraints.txt").read_text(encoding="utf-8")


def test_the_dockerfile() -> None:
    """tests/install runs its steps. Here: one Python for all, the project's pins, no root, and no compiler but one.

    Guards an image that lacked a module beside `errors.py`, without which nothing can be imported.
    """
    assert STAGES["build"][0][1].partition(" AS ")[0] == STAGES["base"][0][1].partition(" AS ")[0]
    assert dict(STAGES[""])["ARG"].removeprefix("PYTHON=") in PYTHONS
    for target in ("cpu", "cuda"):
        assert STAGES[target][0] == ("FROM", f"base AS {target}")
        assert STAGES[target][-1] == ("USER", "tiermoe")
        assert "-c /constraints.txt" in pip_step(target)
    packages = {stage: re.findall(r"apt-get install (.*?)(?: &&|')", str(steps)) for stage, steps in STAGES.items()}
    assert not packages["base"] + packages["cpu"]
    assert "gcc" in packages["cuda"][0]  # Triton's, at run time
    assert not any(map(in_context, (".git/config", ".venv/bin/python", "kernels/_cpu.cpython-311.so", "out/store")))
    assert all(map(in_context, ("kernels/cpu/forms.hpp", "configs/policies/fmoe.yaml", "pyproject.toml")))
    assert [path.name for path in ROOT.glob("*.py") if not in_context(path.name)] == []


@pytest.mark.parametrize("path", _MANIFESTS, ids=lambda path: path.name)
def test_the_groups_hold_what_is_planned(path: Path) -> None:
    """The configuration that is run, planned on the nodes that the manifest makes, with Mixtral's sizes."""
    manifest = _load(path)
    words = manifest["spec"]["entrypoint"].split()
    assert words[:2] == ["tiermoe", {"rayjob": "run"}.get(path.stem, path.stem)]
    assert not {"&&", "|", ";"} & set(words)  # KubeRay's submitter would run the rest itself
    config = load_run_config(words[words.index("--config") + 1])
    nodes = _nodes(manifest)
    topology = plan_topology(cluster_spec(config, engine_settings(config), _MIXTRAL, nodes), _MIXTRAL, nodes)
    groups = {actor.name: actor.node.rpartition("-")[0] for actor in topology.actors}
    assert groups == {
        "lead": "gpu", "shard-1": "gpu", "store-0": "store", "ndp-0": "ndp", "ndp-1": "ndp", "directory": "gpu",
    }  # fmt: skip
    assert sum(actor.experts for actor in topology.having("lead", "shard")) == sum(owned_experts(32, 8, 2))


def test_the_service_reaches_the_server_and_its_end_has_time() -> None:
    assert [path.name for path in _MANIFESTS] == ["bench.yaml", "rayjob.yaml", "serve.yaml"]
    service, job = _documents(_MANIFESTS[2])
    head = _cluster(job)["headGroupSpec"]["template"]
    assert head["metadata"]["labels"] == service["spec"]["selector"]
    words = job["spec"]["entrypoint"].split()
    assert words[words.index("--host") + 1] == "0.0.0.0"
    port = int(words[words.index("--port") + 1])
    (container,) = head["spec"]["containers"]
    assert port in {found["containerPort"] for found in container["ports"]}
    assert service["spec"]["ports"][0]["targetPort"] == port
    (waits,) = [int(found["value"]) for found in container["env"] if found["name"] == "RAY_JOB_STOP_WAIT_TIME_S"]
    assert DRAIN_S < waits < head["spec"]["terminationGracePeriodSeconds"]


def _nodes(manifest: dict[str, Any]) -> list[NodeInfo]:
    """The nodes as Ray would report them: KubeRay passes on the limits and `rayStartParams.resources`."""
    nodes = [NodeInfo("head-0", "10.0.0.1", resources={"CPU": 0.0})]
    to_bytes = TypeAdapter(ByteSize)
    for group in _groups(manifest):
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        # the value is quoted once more for the shell that runs `ray start`
        custom = json.loads(json.loads(group["rayStartParams"].get("resources", '"{}"')))
        resources = {"CPU": float(limits["cpu"]), "memory": float(to_bytes.validate_python(limits["memory"] + "B"))}
        resources |= {"GPU": float(limits["nvidia.com/gpu"])} if "nvidia.com/gpu" in limits else {}
        for replica in range(group["replicas"]):
            name = f"{group['groupName']}-{replica}"
            nodes.append(NodeInfo(name, f"{name}.local", resources=resources | custom))
    return nodes
