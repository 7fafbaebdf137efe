"""The Dockerfile and the compose file agree with the repository and the commands. Nothing is built."""

from __future__ import annotations

import fnmatch
import ipaddress
import json
import re
import shlex
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tests.deploy.manifests import ROOT, golden, parse, pods
from tests.support.secret import write_secret
from weft.common import env
from weft.config.alone import front_alone, group_alone
from weft.config.secret_file import check_secrets
from weft.config.topology import read_topology

DOCKER = ROOT / "deploy/docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text(encoding="utf-8"))
SERVICES = COMPOSE["services"]
STARTED = sorted(SERVICES.keys() - {"secret"})


class Step(NamedTuple):
    stage: str
    word: str
    rest: str


def steps() -> list[Step]:
    """Return the steps of the Dockerfile, with the name of the stage; "" before the first stage."""
    text = (DOCKER / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    found, stage = [], ""
    for line in re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            stage = rest.partition(" AS ")[2]
        found.append(Step(stage, word, rest.strip()))
    return found


def in_context(path: str) -> bool:
    """Return True if ``path`` is part of the build context, by .dockerignore: the last matching line wins."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!").removeprefix("**/")
        deep = "**/" in line
        parts = Path(path).parts
        starts = ["/".join(parts[: number + 1]) for number in range(len(parts))]
        if any(fnmatch.fnmatch(one, pattern) for one in (parts if deep else starts)):
            kept = line.startswith("!")
    return kept


def test_copied_files_exist_in_the_build_context() -> None:
    copied = [shlex.split(step.rest) for step in steps() if step.word == "COPY"]
    sources = [one for words in copied if not words[0].startswith("--from") for one in words[:-1]]
    assert {"weft", "pyproject.toml", "requirements/runtime.txt"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert in_context(source), source
    for path in ("weft/cli/main.py", "weft/ops/cpu/csrc/simd"):
        assert in_context(path)
    for path in (".git/config", ".venv/bin/python", "tests/conftest.py", "weft/cli/__pycache__/main.pyc"):
        assert not in_context(path)
    assert not in_context("weft/ops/cpu/prebuilt/avx2/ops.so")  # built in the image, not taken from here


def test_the_wheel_needs_no_file_that_is_not_copied() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    copied = {word for step in steps() if step.word == "COPY" for word in step.rest.split()}
    for name in re.findall(r'^readme = "(.*)"|^license-files = \["(.*)"\]', text, re.M):
        assert set(filter(None, name)) <= copied


def test_stages_and_arguments_exist() -> None:
    # In order: a step may use only the arguments and the stages of earlier steps.
    declared, known, defaults = set(), set(), {}
    for step in steps():
        if step.word == "ARG":
            name, _, value = step.rest.partition("=")
            declared.add(name)
            defaults.setdefault(name, value)
        used = set(re.findall(r"\$\{?([A-Z_]+)", step.rest)) - {"PATH"}
        assert used <= declared, step
        if step.word == "FROM":
            for device in ("cpu", "cuda"):
                base = step.rest.partition(" AS ")[0].replace("${DEVICE}", device)
                assert base == "${BASE}" or base in known, step
            known.add(step.stage)
        if step.rest.startswith("--from="):
            assert step.rest.removeprefix("--from=").split()[0] in known
    assert defaults["DEVICE"] == "cpu"
    version = re.match(r"python:(3\.\d+)-slim", defaults["BASE"])
    assert version is not None
    assert f"Python :: {version[1]}" in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_commands_of_the_dockerfile_are_understood() -> None:
    runs = [step.rest for step in steps() if step.word == "RUN"]
    (build,) = (shlex.split(one) for one in runs if "python -m weft" in one)
    command, values = parse(build[build.index("weft") + 1 :])
    assert command == "build-ops"
    assert values["wheel"] == Path("weft/ops/cpu/prebuilt")
    last = {step.word: step.rest for step in steps() if step.stage == "weft"}
    assert json.loads(last["ENTRYPOINT"]) == ["weft"]
    assert parse(json.loads(last["CMD"]))[0] == "serve"
    pins = (ROOT / "requirements/runtime.txt").read_text(encoding="utf-8")
    assert len(re.findall(r"^torch==", pins, re.M)) == 1  # the Dockerfile greps this line
    assert re.search(r"^setuptools==", pins, re.M)  # --no-build-isolation


def test_the_user_of_the_image_is_the_user_of_the_pods() -> None:
    last = {step.word: step.rest for step in steps() if step.stage == "weft"}
    (made,) = (step.rest for step in steps() if "useradd" in step.rest)
    assert last["USER"] == "10001:10001"
    assert "--uid 10001" in made
    assert "--owner 10001 --group 10001 --mode 0700 /cache /var/lib/weft" in made
    for _, spec, container in pods(golden("pd")):
        security = spec["securityContext"]
        assert f"{security['runAsUser']}:{security['runAsGroup']}" == last["USER"]
        assert str(container["ports"][0]["containerPort"]) in last["EXPOSE"].split()


def arguments(service: str) -> tuple[str, dict[str, Any]]:
    return parse(SERVICES[service]["command"])


def test_services_of_the_compose_file_are_understood() -> None:
    assert {name: arguments(name)[0] for name in STARTED} == {
        "front": "front",
        "prefill": "engine",
        "decode": "engine",
    }
    subnet = ipaddress.ip_network(COMPOSE["networks"]["groups"]["ipam"]["config"][0]["subnet"])
    addresses = [SERVICES[name]["networks"]["groups"]["ipv4_address"] for name in STARTED]
    assert len(set(addresses)) == len(STARTED)
    for name, address in zip(STARTED, addresses, strict=True):
        command, values = arguments(name)
        assert ipaddress.ip_address(address) in subnet
        assert values["directory"] == "/var/lib/weft/directory"
        port = re.search(r":(\d+)/ready", SERVICES[name]["healthcheck"]["test"][-1])
        assert port is not None
        assert values["port"] == int(port[1])
        if command == "engine":
            assert values["advertise"] == address
        assert SERVICES[name].get("environment", {}).keys() <= env.VARIABLES.keys()
        assert SERVICES[name]["read_only"] is True
        assert SERVICES[name]["depends_on"] == {"secret": {"condition": "service_completed_successfully"}}


def test_the_topology_of_the_compose_file_resolves(tmp_path: Path) -> None:
    topology = read_topology(DOCKER / "topology.yaml")
    secret = str(write_secret(tmp_path))
    for name in ("prefill", "decode"):
        _, values = arguments(name)
        check_secrets([group_alone(topology, values["group"], values["advertise"], secret)])
    front_alone(topology)
    for name in STARTED:
        grace = SERVICES[name]["stop_grace_period"]
        assert int(grace.removesuffix("s")) > topology.front.drain_timeout + 12
    (made,) = {group.config.parallel.group_secret for group in topology.groups}
    assert made is not None
    assert made in " ".join(SERVICES["secret"]["command"])


def test_mounts_and_paths_of_the_compose_file_exist() -> None:
    for name, service in SERVICES.items():
        assert (DOCKER / service["build"]["context"]).resolve() == ROOT.resolve()
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        for volume in service["volumes"]:
            source, target, *_ = volume.split(":")
            assert source in COMPOSE["volumes"] or (DOCKER / source).is_file()
            if name != "secret" and source.startswith("."):
                assert target == SERVICES[name]["command"][1]
