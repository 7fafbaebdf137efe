"""``weft up --on ray`` with several models on one Ray node."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.cli.test_front_models import MODELS, ask, listed, refused
from tests.cli.test_scale import ADMIN, groups, weft
from tests.support.slowness import deadline, until

ray = pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")

from tests.on_ray.cluster import RayNode, up  # noqa: E402
from tests.on_ray.test_ray import engines_of  # noqa: E402

pytestmark = pytest.mark.slow


@pytest.fixture
def node() -> Iterator[RayNode]:
    made = RayNode(cpus=4)
    try:
        yield made
    finally:
        made.close()


def test_each_model_scales_fails_and_ends_by_itself(node: RayNode, tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(MODELS.replace("recovery-timeout: 4", "recovery-timeout: 30"))
    file.chmod(0o600)
    server = up(node, file, tmp_path / "first")
    try:
        base = server.url()
        until(lambda: listed(base) == {"text": "loaded", "latent": "loaded"})
        due = {model: ask(base, model) for model in ("text", "latent")}
        weft(base, "scale", "text", "2", "--model", "text")
        until(lambda: len(groups(base)) == 3 and set(groups(base).values()) == {"running"})
        before = engines_of(node)
        os.kill(before["latent"], signal.SIGKILL)  # Ray starts the group again; requests wait
        assert {model: ask(base, model) for model in due} == due
        assert engines_of(node)["text"] == before["text"]
        answer = httpx.post(f"{base}/admin/models/unload", json={"model": "latent"}, headers=ADMIN)
        assert answer.status_code == 200, answer.text
        until(lambda: listed(base)["latent"] == "unloaded")
        assert "the model latent" in refused(base, "latent")
        weft(base, "scale", "text", "1", "--model", "text")
        assert ask(base, "text") == due["text"]
    finally:
        server.close()
    ended = up(node, file, tmp_path / "stop", "--stop")
    assert ended.process.wait(deadline(90)) == 0, ended.log.read_text()
    ended.close()
