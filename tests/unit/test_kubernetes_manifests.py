"""Fields, references, privileges and network policies in deploy/kubernetes, checked without a cluster."""

import re
from pathlib import Path
from typing import Any, NamedTuple

import kubernetes_validate
import pytest
import yaml

from shared import __version__

ROOT = Path(__file__).resolve().parents[2]
MANIFESTS: list[dict[str, Any]] = [
    document
    for file in sorted((ROOT / "deploy" / "kubernetes").glob("*.yaml"))
    for document in yaml.safe_load_all(file.read_text())
]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [manifest for manifest in MANIFESTS if manifest["kind"] == kind]


def pods() -> list[dict[str, Any]]:
    return [manifest["spec"]["template"] for manifest in of_kind("Deployment") + of_kind("Job")]


def test_manifests_are_the_expected_kinds_with_two_replicas() -> None:
    kinds = sorted(manifest["kind"] for manifest in MANIFESTS)
    singles = ["ConfigMap", "Deployment", "Ingress", "Job", "PodDisruptionBudget", "Service"]
    assert kinds == sorted([*singles, *["NetworkPolicy"] * 4])
    for manifest in MANIFESTS:
        assert re.fullmatch(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?", manifest["metadata"]["name"])
    (deployment,) = of_kind("Deployment")
    assert deployment["spec"]["replicas"] == 2
    (job,) = of_kind("Job")
    assert job["metadata"]["name"].endswith(__version__)
    assert job["spec"]["template"]["spec"]["containers"][0]["args"] == ["db", "upgrade"]


@pytest.mark.parametrize(
    "manifest", MANIFESTS, ids=lambda manifest: f"{manifest['kind']}-{manifest['metadata']['name']}"
)
def test_manifests_have_only_fields_that_kubernetes_knows(manifest: dict[str, Any]) -> None:
    kubernetes_validate.validate(manifest, "1.30", strict=True)


def test_references_between_manifests_resolve() -> None:
    (deployment,), (service,), (budget,), (ingress,), (config,) = map(
        of_kind, ("Deployment", "Service", "PodDisruptionBudget", "Ingress", "ConfigMap")
    )
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert service["spec"]["selector"].items() <= labels.items()
    assert budget["spec"]["selector"]["matchLabels"].items() <= labels.items()
    assert budget["spec"]["minAvailable"] < deployment["spec"]["replicas"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    ports = {port["name"] for port in container["ports"]}
    assert {port["targetPort"] for port in service["spec"]["ports"]} <= ports
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["port"] in ports
    (rule,) = ingress["spec"]["rules"]
    backend = rule["http"]["paths"][0]["backend"]["service"]
    assert backend["name"] == service["metadata"]["name"]
    assert backend["port"]["name"] in {port["name"] for port in service["spec"]["ports"]}
    for pod in pods():
        assert pod["spec"]["containers"][0]["envFrom"] == [{"configMapRef": {"name": config["metadata"]["name"]}}]
    mounted = {mount["mountPath"] for mount in container["volumeMounts"]}
    for variable, value in config["data"].items():
        if variable.endswith("_FILE"):
            assert str(Path(value).parent) in mounted


@pytest.mark.parametrize("pod", pods(), ids=lambda pod: pod["spec"]["containers"][0]["name"])
def test_pods_run_unprivileged_with_limited_resources(pod: dict[str, Any]) -> None:
    spec = pod["spec"]
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["automountServiceAccountToken"] is False
    (container,) = spec["containers"]
    assert container["image"] == f"distrans-coordinator:{__version__}"
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"requests", "limits"} <= container["resources"].keys()
    assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in spec["volumes"]}


class Pod(NamedTuple):
    """One end of a connection; without labels, it is outside the cluster."""

    labels: dict[str, str] | None
    namespace: str = "distrans"


NAME = "app.kubernetes.io/name"
COORDINATOR, MIGRATION = (Pod(pod["metadata"]["labels"]) for pod in pods())
DATABASE, STRANGER = Pod({NAME: "postgres"}), Pod({NAME: "stranger"})
INGRESS = Pod({NAME: "ingress-nginx"}, "ingress-nginx")
PROMETHEUS = Pod({NAME: "prometheus"}, "monitoring")
DNS = Pod({"k8s-app": "kube-dns"}, "kube-system")
IMPOSTOR = Pod(INGRESS.labels)  # the right labels, in another namespace
OUTSIDE = Pod(None)


def is_peer(peer: dict[str, Any], pod: Pod) -> bool:
    assert peer.keys() <= {"namespaceSelector", "podSelector"}
    namespace = peer.get("namespaceSelector", {"matchLabels": {"kubernetes.io/metadata.name": "distrans"}})
    return (
        pod.labels is not None
        and namespace["matchLabels"] == {"kubernetes.io/metadata.name": pod.namespace}
        and peer["podSelector"]["matchLabels"].items() <= pod.labels.items()
    )


def passes(direction: str, pod: Pod, other: Pod, port: str | int) -> bool:
    """Return whether the pod's policies allow the connection; a pod that no policy selects is unrestricted."""
    selecting = [
        policy["spec"]
        for policy in of_kind("NetworkPolicy")
        if direction in policy["spec"]["policyTypes"] and is_peer({"podSelector": policy["spec"]["podSelector"]}, pod)
    ]
    rules = [rule for spec in selecting for rule in spec.get(direction.lower(), [])]
    end = {"Ingress": "from", "Egress": "to"}[direction]
    return not selecting or any(
        any(is_peer(peer, other) for peer in rule[end]) and port in {each["port"] for each in rule["ports"]}
        for rule in rules
    )


@pytest.mark.parametrize(
    ("source", "target", "port", "allowed"),
    [
        (INGRESS, COORDINATOR, "http", True),
        (PROMETHEUS, COORDINATOR, "http", True),
        (COORDINATOR, DATABASE, 5432, True),
        (MIGRATION, DATABASE, 5432, True),
        (DATABASE, DATABASE, 5432, True),
        (COORDINATOR, DNS, 53, True),
        (MIGRATION, DNS, 53, True),
        (DATABASE, OUTSIDE, 443, True),  # backups
        (STRANGER, COORDINATOR, "http", False),
        (IMPOSTOR, COORDINATOR, "http", False),
        (OUTSIDE, COORDINATOR, "http", False),
        (INGRESS, MIGRATION, "http", False),
        (INGRESS, DATABASE, 5432, False),
        (STRANGER, DATABASE, 5432, False),
        (COORDINATOR, OUTSIDE, 443, False),
        (COORDINATOR, STRANGER, 80, False),
        (COORDINATOR, DATABASE, 22, False),
        (MIGRATION, OUTSIDE, 443, False),
    ],
)
def test_network_policies_allow_only_the_listed_traffic(
    source: Pod, target: Pod, port: str | int, allowed: bool
) -> None:
    assert (passes("Egress", source, target, port) and passes("Ingress", target, source, port)) is allowed


def test_policies_open_the_ports_that_pods_use() -> None:
    (deployment,), (config,) = of_kind("Deployment"), of_kind("ConfigMap")
    assert "http" in {port["name"] for port in deployment["spec"]["template"]["spec"]["containers"][0]["ports"]}
    assert re.fullmatch(r"postgresql://\w+@postgres/\w+", config["data"]["DISTRANS_DB"]), "the default port, 5432"
