"""The manifests of ``deploy/kubernetes`` agree with Kubernetes' schemas, the commands and each other."""

from __future__ import annotations

import copy
import re
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import httpx
import pytest
from packaging.requirements import Requirement

from tests.deploy.manifests import (
    GOLDEN,
    KUBERNETES,
    OVERLAYS,
    ROOT,
    Manifest,
    golden,
    named,
    of_kind,
    parse,
    pods,
    render,
    with_component,
)
from tests.support.secret import write_secret
from weft.common import env
from weft.config.alone import front_alone, group_alone
from weft.config.secret_file import check_secrets
from weft.config.topology import Topology, read_topology
from weft.control.directory import kubernetes
from weft.control.directory.engine_host import QUIT_S, SETTLE_S, HostPhase
from weft.front.engine_port import EnginePort
from weft.front.http.access import PROBES

OF_OTHERS = {"HOME", "POD_INDEX"}
"""Variables of manifests that Weft does not read: of libraries, and of the manifests themselves."""
COMPONENTS = [("pd", "autoscale"), ("pd", "inference-pool"), ("epd", "models"), ("unified", "gpu")]

OLDEST, VERSIONS = "1.30", 4

every_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    found = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
    assert len(found) == len(manifests), "two manifests of one kind have the same name"
    return found


def topology_of(manifests: list[Manifest], folder: Path) -> tuple[Topology, str]:
    """Return the topology of the ConfigMap, and the path of the file with the secret."""
    (config,) = of_kind(manifests, "ConfigMap")
    file = folder / "topology.yaml"
    file.write_text(config["data"]["topology.yaml"])
    topology = read_topology(file)
    (secret,) = {group.config.parallel.group_secret for group in topology.groups}
    assert secret is not None
    return topology, secret


# --- the golden files ---


def test_every_overlay_has_a_golden_file() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == OVERLAYS


@every_overlay
def test_kubectl_renders_the_golden_file(overlay: str) -> None:
    """After a change: ``kubectl kustomize deploy/kubernetes/overlays/N > tests/deploy/rendered/N.yaml``."""
    assert by_name(render(KUBERNETES / "overlays" / overlay)) == by_name(golden(overlay))


# --- the schemas of Kubernetes ---


def validate(manifests: list[Manifest]) -> int:
    """Check all manifests of Kubernetes' own kinds strictly against ``VERSIONS`` versions: the three newest,
    and the oldest that the guide promises. Return the number of checks."""
    checker: Any = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed: requirements/deploy.txt"
    )
    checked = 0
    for version in [OLDEST, *checker.utils.all_versions()[-3:]]:
        for one in manifests:
            if one["kind"] != "InferencePool":  # a kind of an extension, without a schema
                checker.validate(one, version, strict=True)
                checked += 1
    return checked


@every_overlay
def test_manifests_are_valid_for_old_and_new_versions_of_kubernetes(overlay: str) -> None:
    manifests = golden(overlay)
    assert validate(manifests) == VERSIONS * len(manifests)


def test_the_check_refuses_an_unknown_field() -> None:
    wrong = copy.deepcopy(named(golden("pd"), "StatefulSet", "decode"))
    wrong["spec"]["template"]["spec"]["containers"][0]["readynessProbe"] = {}
    with pytest.raises(Exception, match="readynessProbe"):
        validate([wrong])


@pytest.mark.parametrize(("overlay", "component"), COMPONENTS)
def test_components_are_valid(overlay: str, component: str, tmp_path: Path) -> None:
    manifests = with_component(tmp_path, overlay, component)
    assert by_name(manifests) != by_name(golden(overlay))
    assert validate(manifests) > VERSIONS * (len(golden(overlay)) - 1)


def test_the_pin_of_the_checker_satisfies_the_extra() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (asked,) = map(Requirement, extras["deploy"])
    pins = (ROOT / "requirements/deploy.txt").read_text().splitlines()
    (pin,) = (line.partition("==")[2] for line in pins if line.startswith(f"{asked.name}=="))
    assert asked.specifier.contains(pin)


def test_the_guide_names_the_oldest_version() -> None:
    assert f"need Kubernetes {OLDEST} or later" in (ROOT / "docs/guides/kubernetes.md").read_text()


# --- the commands ---


@every_overlay
def test_the_commands_are_understood(overlay: str) -> None:
    for workload, _, container in pods(golden(overlay)):
        program, *words = [*container["command"], *container["args"]]
        assert program == "weft"
        name = workload["metadata"]["name"]
        command, values = parse([word.replace("$(POD_INDEX)", "3") for word in words])
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert values["host"] == "0.0.0.0"
        assert values["port"] == ports[kubernetes.PORT]
        if workload["kind"] == "Deployment":
            assert command == "front"
            assert values["directory"] == "kubernetes:weft-groups"
        else:
            assert (command, values["directory"], values["group"]) == ("engine", "port", f"{name}3")


def test_the_check_refuses_an_unknown_flag() -> None:
    with pytest.raises(click.UsageError, match="no flag --adress"):
        parse(["engine", "topology.yaml", "--group", "decode0", "--adress", "10.0.0.1"])


@every_overlay
def test_the_variables_are_known(overlay: str) -> None:
    for workload, _, container in pods(golden(overlay)):
        names = {one["name"] for one in container["env"]}
        assert names <= env.VARIABLES.keys() | OF_OTHERS
        assert "WEFT_ADMIN_KEY" in names
        if workload["kind"] == "StatefulSet":
            known = {one["name"]: one["valueFrom"] for one in container["env"] if "valueFrom" in one}
            assert known["WEFT_ADVERTISE"]["fieldRef"]["fieldPath"] == "status.podIP"
            # A reference $(NAME) in args needs the variable, and Kubernetes sets this label on each pod.
            assert set(re.findall(r"\$\((\w+)\)", " ".join(container["args"]))) == {"POD_INDEX"}
            label = known["POD_INDEX"]["fieldRef"]["fieldPath"]
            assert label == "metadata.labels['apps.kubernetes.io/pod-index']"


@every_overlay
def test_the_topology_resolves_for_each_group_and_for_the_api_server(overlay: str, tmp_path: Path) -> None:
    manifests = golden(overlay)
    topology, path = topology_of(manifests, tmp_path)
    secret = str(write_secret(tmp_path))
    roles = set()
    for workload in of_kind(manifests, "StatefulSet"):
        for number in (0, 7):  # decode7 is not listed in the file
            name = f"{workload['metadata']['name']}{number}"
            config = group_alone(topology, name, "10.0.0.1", secret)
            check_secrets([config])
            roles.add(config.transfer.role)
    assert roles == {group.config.transfer.role for group in topology.groups}
    front_alone(topology)
    for _, spec, container in pods(manifests):
        (volume,) = (one for one in spec["volumes"] if one["name"] == "secret")
        (mount,) = (one for one in container["volumeMounts"] if one["name"] == "secret")
        assert path == f"{mount['mountPath']}/{volume['secret']['items'][0]['path']}"


# --- probes, drains and metrics ---


@pytest.fixture(scope="module")
def port() -> Any:
    """The URL of the HTTP port of a group that serves."""
    server: Any = SimpleNamespace(phase=HostPhase.SERVING, instances=[], records=[])
    made = EnginePort(server, "spool-text", "127.0.0.1", 0, None)
    yield f"http://{made.address}"
    made.close()


@every_overlay
def test_probes_ask_routes_that_need_no_key(overlay: str, port: str) -> None:
    for workload, _, container in pods(golden(overlay)):
        probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
        assert {probe["port"] for probe in probes.values()} == {"http"}
        assert (probes["readiness"]["path"], probes["liveness"]["path"]) == ("/ready", "/live")
        paths = {probe["path"] for probe in probes.values()}
        if workload["kind"] == "Deployment":
            assert paths <= PROBES
        else:
            annotations = workload["spec"]["template"]["metadata"]["annotations"]
            assert annotations["prometheus.io/port"] == str(container["ports"][0]["containerPort"])
            for path in paths | {annotations["prometheus.io/path"]}:
                assert httpx.get(port + path).status_code == 200, path


@every_overlay
def test_a_drain_ends_before_kubernetes_kills(overlay: str, tmp_path: Path) -> None:
    manifests = golden(overlay)
    topology, _ = topology_of(manifests, tmp_path)
    for workload, spec, container in pods(manifests):
        before = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
        after = SETTLE_S + QUIT_S if workload["kind"] == "StatefulSet" else 0
        due = before + topology.front.drain_timeout + after
        assert spec["terminationGracePeriodSeconds"] > due


def test_autoscalers_watch_metrics_that_exist(tmp_path: Path) -> None:
    manifests = with_component(tmp_path, "pd", "autoscale")
    known = {line.split()[0] for line in (ROOT / "docs/metrics.txt").read_text().splitlines()}
    scaled = set()
    for one in of_kind(manifests, "HorizontalPodAutoscaler"):
        target = one["spec"]["scaleTargetRef"]
        scaled.add(target["name"])
        assert "replicas" not in named(manifests, target["kind"], target["name"])["spec"]
        for metric in one["spec"]["metrics"]:
            assert metric["pods"]["metric"]["name"].replace("weft_", "weft:", 1) in known
    assert scaled == {"prefill", "decode"}


# --- manifests that refer to each other ---


@every_overlay
def test_pods_run_with_few_rights(overlay: str) -> None:
    for workload, spec, container in pods(golden(overlay)):
        security, inner = spec["securityContext"], container["securityContext"]
        assert security["runAsNonRoot"] is True
        assert security["runAsUser"] == security["fsGroup"] == 10001
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert inner["allowPrivilegeEscalation"] is False
        assert inner["readOnlyRootFilesystem"] is True
        assert inner["capabilities"] == {"drop": ["ALL"]}
        # A group asks Kubernetes for nothing.
        assert spec["automountServiceAccountToken"] is (workload["kind"] == "Deployment")
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert {mount["name"] for mount in mounts.values()} == volumes.keys()
        (home,) = (one["value"] for one in container["env"] if one["name"] == "HOME")
        for path in (home, "/tmp"):  # Weft writes here
            assert "emptyDir" in volumes[mounts[path]["name"]]
            assert not mounts[path].get("readOnly")
        # With fsGroup, 0400 becomes 0440 with the owner root: see tests/config/test_secret_file.py.
        assert volumes["secret"]["secret"]["defaultMode"] == 0o400


def selects(selector: dict[str, str], workload: Manifest) -> bool:
    return selector.items() <= workload["spec"]["template"]["metadata"]["labels"].items()


@every_overlay
def test_services_budgets_and_rights_find_their_pods(overlay: str) -> None:
    # Labels join everything: each selector must match its own pods, and no others.
    manifests = golden(overlay)
    workloads = [workload for workload, _, _ in pods(manifests)]
    for workload in workloads:
        assert selects(workload["spec"]["selector"]["matchLabels"], workload)
        others = [one for one in workloads if one is not workload]
        assert not any(selects(workload["spec"]["selector"]["matchLabels"], one) for one in others)
        budgets = [
            one["spec"]["maxUnavailable"]
            for one in of_kind(manifests, "PodDisruptionBudget")
            if selects(one["spec"]["selector"]["matchLabels"], workload)
        ]
        assert budgets == [1]
    headless = named(manifests, "Service", "weft-groups")["spec"]
    assert headless["clusterIP"] == "None"
    assert headless["publishNotReadyAddresses"] is True
    assert [one["name"] for one in headless["ports"]] == [kubernetes.PORT]
    for workload in workloads:
        engine = workload["kind"] == "StatefulSet"
        assert selects(headless["selector"], workload) is engine
        assert selects(named(manifests, "Service", "weft")["spec"]["selector"], workload) is not engine
        if engine:
            assert workload["spec"]["serviceName"] == "weft-groups"
            assert workload["spec"]["podManagementPolicy"] == "Parallel"
        else:
            account = workload["spec"]["template"]["spec"]["serviceAccountName"]
            named(manifests, "ServiceAccount", account)
            (binding,) = of_kind(manifests, "RoleBinding")
            assert [one["name"] for one in binding["subjects"]] == [account]
            (rule,) = named(manifests, "Role", binding["roleRef"]["name"])["rules"]
            assert rule["apiGroups"] == ["discovery.k8s.io"]
            assert rule["resources"] == ["endpointslices"]
            assert set(rule["verbs"]) == {"get", "list", "watch"}


@every_overlay
def test_the_guide_makes_the_secret_that_pods_read(overlay: str) -> None:
    guide = (ROOT / "docs/guides/kubernetes.md").read_text(encoding="utf-8")
    made = set(re.findall(r"--from-(?:literal|file)=([a-z-]+)=", guide))
    for _, spec, container in pods(golden(overlay)):
        found = [one["valueFrom"].get("secretKeyRef") for one in container["env"] if "valueFrom" in one]
        found = [one for one in found if one is not None]
        assert {one["name"] for one in found} == {"weft-secret"}
        items = [item for one in spec["volumes"] if "secret" in one for item in one["secret"]["items"]]
        assert {one["key"] for one in [*found, *items]} <= made
    assert "secret generic weft-secret" in guide


@every_overlay
def test_only_groups_on_gpus_ask_for_gpus(overlay: str) -> None:
    for workload, _, container in pods(golden(overlay)):
        gpu = overlay.endswith("-gpu") and workload["kind"] == "StatefulSet"
        assert ("nvidia.com/gpu" in container["resources"]["limits"]) is gpu
        assert container["image"].endswith("-cuda" if gpu else "-cpu")
