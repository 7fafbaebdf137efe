"""Several models whose engines run alone, behind ``weft front``."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cli.test_engine_front import Fleet, get
from tests.cli.test_scale import ADMIN, groups, load, weft
from tests.cli.test_up import PROMPT
from tests.support.slowness import deadline, until

pytestmark = pytest.mark.slow

MODELS = """
threads: 1
max-num-seqs: 8
kv-cache-memory: 64M
front: {port: 0, admin-key: [secret], recovery-timeout: 4}
models:
  text: {model: spool-text, aliases: [default]}
  latent: {model: spool-mla}
"""
PAIRS = MODELS.replace(
    "latent: {model: spool-mla}",
    "latent: {model: spool-mla, groups: [{role: prefill, name: lp}, {role: decode, name: ld}]}",
)


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    made = Fleet(tmp_path)
    made.file.write_text(MODELS)
    try:
        yield made
    finally:
        made.close()


def post(base: str, model: str, tokens: int = 24) -> httpx.Response:
    body = {"model": model, "prompt": PROMPT, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return httpx.post(f"{base}/v1/completions", json=body, timeout=deadline(120))


def ask(base: str, model: str, tokens: int = 24) -> str:
    answer = post(base, model, tokens)
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == model
    text: str = answer.json()["choices"][0]["text"]
    assert text
    return text


def listed(base: str) -> dict[str, str]:
    """Return model -> state of /v1/models."""
    return {one["id"]: one["status"] for one in get(f"{base}/v1/models")[1]["data"]}


def alone(fleet: Fleet, model: str, tokens: int) -> str:
    """Return the text of a server of one model."""
    place = fleet.folder / f"alone-{model}"
    place.mkdir()
    from tests.cli.test_serve import Server

    server = Server(place, model, "--threads", "1", "--max-num-seqs", "8", "--port", "0")
    try:
        return ask(server.url(), model, tokens)
    finally:
        server.close()


def refused(base: str, model: str) -> str:
    """Return the message of a 503."""
    answer = post(base, model)
    assert answer.status_code == 503, answer.text
    assert int(answer.headers["retry-after"]) >= 1
    message: str = answer.json()["error"]["message"]
    return message


def test_two_models_behind_two_api_servers(fleet: Fleet) -> None:
    """A model joins later, loses its only engine, and comes back. The other model loses one of two engines.
    All answers have the tokens of a server of one model."""
    due = {"text": alone(fleet, "spool-text", 1200), "latent": alone(fleet, "spool-mla", 24)}
    fronts = [fleet.run("front"), fleet.run("front")]
    first = fleet.engine("text")
    bases = [one.url() for one in fronts]
    for base in bases:
        assert listed(base) == {"text": "loaded"}
        assert "the model latent" in refused(base, "latent")
        assert post(base, "other").status_code == 404
        assert ask(base, "default", 8) == ask(base, "text", 8)

    latent = fleet.engine("latent")
    for base in bases:
        until(lambda: listed(base) == {"text": "loaded", "latent": "loaded"})  # noqa: B023
        assert ask(base, "latent") == due["latent"]
        assert groups(base) == {"text": "running", "latent": "running"}

    second = fleet.engine("text1")
    until(lambda: all(groups(base).get("text1") == "running" for base in bases))
    with ThreadPoolExecutor(4) as pool:
        streams = [pool.submit(ask, base, "text", 1200) for base in bases * 2]
        until(lambda: load(bases[0], "text") or load(bases[0], "text1"))  # one engine may get all streams
        busy = first if load(bases[0], "text") else second
        os.kill(busy.engine(), signal.SIGKILL)
        os.kill(latent.engine(), signal.SIGKILL)
        assert latent.process.wait(deadline(30)) == 1
        messages = list(pool.map(refused, bases, ["latent"] * 2))
        assert all("the model latent" in one for one in messages), messages
        assert [one.result(deadline(120)) for one in streams] == [due["text"]] * 4
    for base in bases:
        assert get(f"{base}/ready")[0] == 200, "one model without engines takes no requests from the other"
        status, said = get(f"{base}/health")
        assert (status, said["status"]) == (200, "degraded")
        until(lambda: listed(base)["latent"] == "unloaded")  # noqa: B023

    fleet.engine("latent")
    for base in bases:
        until(lambda: listed(base)["latent"] == "loaded")  # noqa: B023
        assert ask(base, "latent") == due["latent"]
        assert get(f"{base}/health")[1]["status"] == "alive"
    assert "without a unified group" in weft(bases[0], "drain", "latent", "--model", "latent", status=2)
    unload = httpx.post(f"{bases[0]}/admin/models/unload", json={"model": "latent"}, headers=ADMIN)
    assert unload.status_code == 200, unload.text
    for base in bases:
        until(lambda: listed(base)["latent"] == "unloaded")  # noqa: B023
        assert "the model latent" in refused(base, "latent")
        assert get(f"{base}/health")[1]["status"] == "alive", "a model that left in order is no fault"
        assert ask(base, "text", 8) == due["text"][: len(ask(base, "text", 8))]


def test_requests_wait_while_the_only_engine_of_a_model_starts_again(fleet: Fleet) -> None:
    fleet.file.write_text(MODELS.replace("recovery-timeout: 4", "recovery-timeout: 120"))
    fleet.engine("text")
    latent = fleet.engine("latent")
    base = fleet.run("front").url()
    until(lambda: len(listed(base)) == 2)
    due = ask(base, "latent", 1200)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(ask, base, "latent", 1200)
        until(lambda: load(base, "latent"))
        os.kill(latent.engine(), signal.SIGKILL)
        assert latent.process.wait(deadline(30)) == 1
        waiting = pool.submit(ask, base, "latent", 8)
        fleet.engine("latent")
        assert running.result(deadline(120)) == due
        assert due.startswith(waiting.result(deadline(120)))


def test_a_model_with_prefill_and_decode_groups_over_http(fleet: Fleet) -> None:
    """Each model has groups and metrics of its own. The API server asks the groups for their records. A
    request that misses a role gets the name of the role."""
    fleet.file.write_text(PAIRS)
    names = ["text", "lp", "ld"]
    engines = [fleet.engine(one, "--directory", "port", "--port", "0") for one in names]
    urls: list[str] = []
    for one in engines:
        until(lambda: "http://127" in one.log.read_text())  # noqa: B023
        urls.append(one.log.read_text().split("http://")[1].split()[0])
    base = fleet.run("front", "--directory", ",".join(f"http://{url}" for url in urls)).url()
    until(lambda: listed(base) == {"text": "loaded", "latent": "loaded"})
    assert {ask(base, "latent") for _ in range(2)} == {alone(fleet, "spool-mla", 24)}
    assert ask(base, "text") == alone(fleet, "spool-text", 24)
    page = httpx.get(f"{base}/metrics", timeout=deadline(30)).text
    assert 'weft:front_pairs_total{model_name="latent"} 2.0' in page, page
    assert 'weft:model_state{model_name="text",state="loaded"} 1.0' in page
    os.kill(engines[2].engine(), signal.SIGKILL)
    assert engines[2].process.wait(deadline(30)) == 1
    assert "no group of the role decode" in refused(base, "latent")
    assert listed(base)["latent"] == "loaded", "the prefill group stays"
    assert ask(base, "text", 8)


def test_api_servers_share_the_pause_of_all_models(fleet: Fleet) -> None:
    """Also with a model that joins during the pause."""
    fleet.engine("text")
    bases = [fleet.run("front").url(), fleet.run("front").url()]

    def command(base: str, route: str) -> None:
        answer = httpx.post(f"{base}{route}", headers=ADMIN, timeout=deadline(60))
        assert answer.status_code == 200, answer.text

    def paused() -> list[Any]:
        return [httpx.get(f"{one}/is_paused", headers=ADMIN).json()["is_paused"] for one in bases]

    command(bases[0], "/pause")
    until(lambda: paused() == [True, True])
    fleet.engine("latent")
    until(lambda: all(listed(one).get("latent") == "loaded" for one in bases))
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(ask, one, "latent") for one in bases]
        assert [get(f"{one}/ready")[1]["status"] for one in bases] == ["paused"] * 2
        time.sleep(1.0)
        assert not any(one.done() for one in waiting)
        command(bases[1], "/resume")
        assert len({one.result(deadline(60)) for one in waiting}) == 1
    until(lambda: paused() == [False, False])
