"""``ray job submit -- weft up FILE --on ray``: the API server as a job of Ray. Needs ``ray[default]``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="ray is not installed: pip install weft[ray]")
pytest.importorskip("aiohttp_cors", reason='jobs need pip install "ray[default]"')

import httpx

from tests.cli.test_up import ask
from tests.on_ray.cluster import RAY, RayNode, _free_port, up
from tests.support.slowness import deadline, until

TOPOLOGY = """
model: spool-text
threads: 1
groups:
  - {role: unified}
"""


@pytest.mark.slow
@pytest.mark.real_processes
def test_a_job_serves_and_its_groups_outlive_the_job(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(TOPOLOGY)
    file.chmod(0o600)
    node = RayNode(cpus=2, dashboard=True)
    try:
        port = _free_port()
        base = f"http://127.0.0.1:{port}"
        command = [*RAY, "job", "submit", "--address", node.dashboard, "--no-wait", "--submission-id", "shop"]
        command += ["--working-dir", str(tmp_path), "--", sys.executable, "-m", "weft", "up", "shop.yaml"]
        command += ["--on", "ray", "--port", str(port)]
        # A job has no variables of this process.
        environment = {**os.environ, "RAY_USAGE_STATS_ENABLED": "0"}
        said = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=deadline(60))
        assert said.returncode == 0, said.stdout + said.stderr

        def ready() -> bool:
            try:
                return httpx.get(f"{base}/ready", timeout=deadline(30)).status_code == 200
            except httpx.TransportError:
                return False

        until(ready, 120)
        due = ask(base)
        stop = [*RAY, "job", "stop", "--address", node.dashboard, "shop"]
        subprocess.run(stop, env=environment, capture_output=True, check=True, timeout=deadline(60))
        again = up(node, file, tmp_path / "again", "--port", "0")
        assert ask(again.url()) == due
        again.close()
    finally:
        node.close()
