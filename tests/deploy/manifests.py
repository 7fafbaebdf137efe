"""The manifests of ``deploy/kubernetes``: the golden files, and what ``kubectl kustomize`` renders."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from weft.cli.main import cli

ROOT = Path(__file__).parents[2]
KUBERNETES = ROOT / "deploy/kubernetes"
GOLDEN = Path(__file__).parent / "rendered"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())

Manifest = dict[str, Any]


def golden(overlay: str) -> list[Manifest]:
    """Return the manifests of the golden file of ``overlay``."""
    return list(yaml.safe_load_all((GOLDEN / f"{overlay}.yaml").read_text(encoding="utf-8")))


def render(folder: Path) -> list[Manifest]:
    """Return the manifests that kubectl renders from ``folder``. Skip the test without kubectl."""
    if shutil.which("kubectl") is None:
        pytest.skip("there is no kubectl, which renders deploy/kubernetes")
    done = subprocess.run(["kubectl", "kustomize", str(folder)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def with_component(folder: Path, overlay: str, component: str) -> list[Manifest]:
    """Render ``overlay`` with an optional component, by a kustomization in ``folder``."""
    here = Path(os.path.relpath(KUBERNETES.resolve(), folder.resolve()))
    text = {
        "resources": [str(here / "overlays" / overlay)],
        "components": [str(here / "components" / component)],
    }
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(text))
    return render(folder)


def of_kind(manifests: list[Manifest], kind: str) -> list[Manifest]:
    """Return the manifests of one kind, e.g. StatefulSet."""
    return [one for one in manifests if one["kind"] == kind]


def named(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """Return the manifest of a kind and a name."""
    (found,) = (one for one in of_kind(manifests, kind) if one["metadata"]["name"] == name)
    return found


def pods(manifests: list[Manifest]) -> Iterator[tuple[Manifest, Manifest, Manifest]]:
    """Yield (workload, pod spec, container) of each StatefulSet and Deployment."""
    for one in [*of_kind(manifests, "StatefulSet"), *of_kind(manifests, "Deployment")]:
        spec = one["spec"]["template"]["spec"]
        (container,) = spec["containers"]
        yield one, spec, container


def parse(words: list[str]) -> tuple[str, dict[str, Any]]:
    """Parse the arguments behind ``weft``. Return the command and the values of its options. Nothing runs.

    Raise click.UsageError for an unknown command or option.
    """
    context = cli.make_context("weft", list(words), resilient_parsing=False)
    while isinstance(context.command, click.Group) and (rest := [*context._protected_args, *context.args]):
        name, sub, rest = context.command.resolve_command(context, rest)
        assert sub is not None, words
        context = sub.make_context(name, rest, parent=context)
    return context.command.name or "", context.params
