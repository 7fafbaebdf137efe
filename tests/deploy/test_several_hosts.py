"""``deploy/kubernetes/several-hosts``: one group over the pods of a LeaderWorkerSet."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.manifests import KUBERNETES, Manifest, golden, named, of_kind, parse, render
from tests.support.secret import write_secret
from weft.cli.serve.several_hosts import HostPlace
from weft.common import env
from weft.config.alone import front_alone, group_alone
from weft.config.secret_file import check_secrets
from weft.config.topology import read_topology
from weft.control.directory import kubernetes
from weft.control.directory.engine_host import QUIT_S, SETTLE_S

FOLDER = KUBERNETES / "several-hosts"
OF_OTHERS = {"HOME", "GROUP_INDEX"}
"""Variables that Weft does not read: of libraries, and of the manifest itself."""
OF_SETS = {"LWS_LEADER_ADDRESS", "LWS_WORKER_INDEX"}
"""Variables that a LeaderWorkerSet gives to each container."""


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    return golden("../several-hosts")


@pytest.fixture(scope="module")
def hosts(manifests: list[Manifest]) -> Manifest:
    found: Manifest = named(manifests, "LeaderWorkerSet", "weft-unified")["spec"]["leaderWorkerTemplate"]
    return found


def container_of(hosts: Manifest) -> dict[str, Any]:
    (container,) = hosts["workerTemplate"]["spec"]["containers"]
    return dict(container)


def with_values(word: str, values: dict[str, str]) -> str:
    """Return ``word`` with a value in place of each $(NAME), as Kubernetes does."""
    return re.sub(r"\$\((\w+)\)", lambda found: values[found[1]], word)


def test_kubectl_renders_the_golden_file(manifests: list[Manifest]) -> None:
    """After a change: ``kubectl kustomize FOLDER > tests/deploy/several-hosts.yaml``."""
    assert render(FOLDER) == manifests


def test_a_pod_is_replaced_alone(hosts: Manifest) -> None:
    """Any other policy ends all pods of a group with one pod."""
    assert hosts["restartPolicy"] == "None"
    assert "leaderTemplate" not in hosts  # all pods have the same command


def test_the_pod_is_valid_and_like_the_pod_of_a_group_on_one_host(hosts: Manifest) -> None:
    template = copy.deepcopy(hosts["workerTemplate"])
    one = named(golden("unified"), "StatefulSet", "unified")["spec"]["template"]
    spec, alone = dict(template["spec"]), dict(one["spec"])
    (mine,), (its,) = spec.pop("containers"), alone.pop("containers")
    names = [[volume.pop("configMap", None) for volume in part.pop("volumes")] for part in (spec, alone)]
    assert [bool(name) for name in names[0]] == [bool(name) for name in names[1]]
    assert spec == alone
    assert {key: value for key, value in mine.items() if key not in ("args", "env", "ports")} == {
        key: value for key, value in its.items() if key not in ("args", "env", "ports")
    }
    checker: Any = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    whole = hosts["workerTemplate"]["spec"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}, "spec": whole}
    for version in checker.utils.all_versions()[-3:]:
        checker.validate(pod, version, strict=True)


def test_all_pods_have_one_command_which_fits_each(
    hosts: Manifest, manifests: list[Manifest], tmp_path: Path
) -> None:
    container = container_of(hosts)
    words = [*container["command"][1:], *container["args"]]
    known = {one["name"]: one for one in container["env"]}
    assert known.keys() <= env.VARIABLES.keys() | OF_OTHERS
    used = set(re.findall(r"\$\((\w+)\)", " ".join(words)))
    assert used == OF_SETS | {"GROUP_INDEX"}
    label = known["GROUP_INDEX"]["valueFrom"]["fieldRef"]["fieldPath"]
    assert label == "metadata.labels['leaderworkerset.sigs.k8s.io/group-index']"
    (config,) = of_kind(manifests, "ConfigMap")
    file = tmp_path / "topology.yaml"
    file.write_text(config["data"]["topology.yaml"])
    topology, secret = read_topology(file), str(write_secret(tmp_path))
    front_alone(topology)
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for index in range(hosts["size"]):
        values = {"GROUP_INDEX": "3", "LWS_LEADER_ADDRESS": "w-3.w.ns", "LWS_WORKER_INDEX": str(index)}
        said = [with_values(word, values) for word in words]
        command, given = parse(said)
        assert (command, given["group"], given["directory"]) == ("engine", "unified3", "port")
        assert given["port"] == ports[kubernetes.PORT]
        place = HostPlace(given["host_index"], given["join"], given["join_port"])
        assert place.head() == ("w-3.w.ns", ports["join"])
        parallel = topology.groups[0].config.parallel
        assert place.address(parallel, "10.0.0.1") == "10.0.0.1"
        resolved = group_alone(topology, "unified3", "10.0.0.1", secret, index)
        check_secrets([resolved])
        assert resolved.parallel.hosts == hosts["size"]
        assert resolved.host.index == index


def test_the_pods_are_found_and_drain_in_time(hosts: Manifest, manifests: list[Manifest]) -> None:
    headless = named(manifests, "Service", "weft-groups")["spec"]
    assert headless["selector"].items() <= hosts["workerTemplate"]["metadata"]["labels"].items()
    grace = hosts["workerTemplate"]["spec"]["terminationGracePeriodSeconds"]
    (config,) = of_kind(manifests, "ConfigMap")
    (timeout,) = re.findall(r"drain-timeout: (\d+)", config["data"]["topology.yaml"])
    assert grace > int(timeout) + SETTLE_S + QUIT_S
    mounted = [
        volume["configMap"]["name"]
        for volume in hosts["workerTemplate"]["spec"]["volumes"]
        if "configMap" in volume
    ]
    assert mounted == [config["metadata"]["name"]]
