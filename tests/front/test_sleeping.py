"""Sleep and wake-up over HTTP: memory, tokens, waiting requests, and new weights during a sleep."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.front.test_weight_updates import ADMIN, ARGUMENTS, BASE, complete, numbers, post, update
from tests.support.new_weights import changed, read_tensors, write_checkpoint
from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from weft.common.errors import InvalidRequest
from weft.front.requests.pausing import PauseState
from weft.store.fixed_weights import PARTS


def test_states() -> None:
    """The last part ends the sleep. The pause from before a sleep stays."""
    first = PauseState()
    asleep = first.sleep("0", "abort", 2)
    half = asleep.wake("1", ["weights"])
    assert (half.level, half.asleep, half.mode) == (2, ("kv_cache",), "wait")  # aborts no second time
    assert half.wake("0", PARTS) == PauseState(3, "0", "")
    assert half.sleep("0", "keep", 1)[3:] == (2, PARTS, "")
    paused = asleep.next("0", "keep")
    assert paused.wake("0", PARTS) == first.next("0", "").next("0", "")._replace(number=3, mode="keep")
    assert first.next("0", "abort").sleep("0", "keep", 1).wake("0", PARTS).mode == "wait"
    with pytest.raises(InvalidRequest, match="POST /wake_up"):
        half.next("0", "")
    for state in (first, asleep, half, paused):
        assert PauseState.read(state.text()) == state


def resident(server: Running) -> int:
    """Return the private bytes of all engine processes and ranks in memory. Spare processes, which load
    at any time, do not count."""
    children = psutil.Process(server.process.pid).children(recursive=True)
    names = {one: " ".join(one.cmdline()) for one in children}
    others = ("read_worker", "weft: spare")
    return sum(
        one.memory_full_info().uss for one, name in names.items() if not any(part in name for part in others)
    )


def all_sleep(server: Running) -> bool:
    """Return True if every engine process is up and sleeps."""
    return bool(httpx.get(server.url + "/health").json() == {"status": "sleeping"})


def state(server: Running) -> Any:
    return httpx.get(server.url + "/is_sleeping", headers=ADMIN).json()["is_sleeping"]


FORMS = ["", "--tensor-parallel-size 2", "--data-parallel-size 2", "--prefill 1 --decode 1"]


@pytest.mark.slow
@pytest.mark.parametrize("more", FORMS)
def test_memory_goes_and_tokens_come_back(servers: Servers, tmp_path: Path, more: str) -> None:
    new = write_checkpoint(tmp_path / "new", BASE, changed(read_tensors(BASE), 1))
    server = servers.weft(*ARGUMENTS, *more.split(), "--kv-cache-memory", "64M")
    before = complete(server, max_tokens=1500)
    for level in (1, 2):
        full = resident(server)
        # A request that runs is held, and a request of the sleep waits.
        made: list[dict[str, Any]] = []

        def ask(into: list[dict[str, Any]] = made) -> None:
            into.append(complete(server, max_tokens=1500))

        threads = [threading.Thread(target=ask) for _ in range(2)]
        threads[0].start()
        assert post(server, f"/sleep?level={level}&mode=keep").json() == {"status": "sleeping"}
        assert state(server)
        threads[1].start()
        low = resident(server)
        assert low < full - (1 << 20) * (1 if level == 1 else 5)
        assert httpx.get(server.url + "/health").json()["status"] == "sleeping"
        assert httpx.get(server.url + "/ready").json() == {"status": "sleeping"}
        page = httpx.get(server.url + "/metrics").text
        assert f'weft:sleep_level{{model_name="spool-text"}} {level}.0' in page
        assert post(server, "/resume").status_code == 400
        assert post(server, "/wake_up?tags=weights").json() == {"status": "sleeping"}
        assert state(server)
        assert post(server, "/wake_up").json() == {"status": "awake"}
        assert not state(server)
        for thread in threads:
            thread.join(deadline(90))
        assert [numbers(one) for one in made] == [numbers(before)] * 2
    assert post(server, "/sleep?level=2").status_code == 200
    assert post(server, "/wake_up?tags=weights").status_code == 200
    assert update(server, new, "step-1").status_code == 200
    assert post(server, "/wake_up?tags=kv_cache").json() == {"status": "awake"}
    after = complete(server)
    assert after["weight_version"] == "step-1"
    plain = servers.weft(*ARGUMENTS[1:], *more.split(), str(new), "--served-model-name", "spool-text")
    assert numbers(complete(plain)) == numbers(after)


@pytest.mark.slow
def test_refusals(servers: Servers) -> None:
    server = servers.weft(*ARGUMENTS)
    for query in ("level=0", "level=3", "mode=other", "tags=weights"):
        assert post(server, f"/sleep?{query}").status_code == 400
    assert post(server, "/wake_up?tags=other").status_code == 400
    assert post(server, "/wake_up").json() == {"status": "awake"}
    assert httpx.post(server.url + "/sleep").status_code == 401
    assert post(server, "/sleep?level=2").status_code == 200
    body = {"update_info": {"path": str(BASE), "partial": True}}
    assert post(server, "/start_weight_update").status_code == 200
    assert post(server, "/update_weights", body).status_code == 200
    refused = post(server, "/finish_weight_update")
    assert "the weights are empty after a sleep of level 2" in refused.json()["error"]["message"]
    assert post(server, "/wake_up").status_code == 200


@pytest.mark.slow
def test_an_engine_that_dies_in_a_sleep_and_a_server_that_ends_in_one(
    servers: Servers, tmp_path: Path
) -> None:
    """After an update of some tensors. Both engines have the weights again."""
    tensors = changed(read_tensors(BASE), 1)
    new = {name: one for name, one in tensors.items() if ".layers.1.self_attn." in name}
    folder = write_checkpoint(tmp_path / "new", BASE, new)
    server = servers.weft(*ARGUMENTS, "--data-parallel-size", "2")
    assert update(server, folder, "some", partial=True).status_code == 200
    before = complete(server)
    assert post(server, "/sleep?level=2").status_code == 200
    os.kill(server.engine(), signal.SIGKILL)
    waits: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: waits.append(complete(server)))
    thread.start()
    until = time.monotonic() + deadline(60)
    # Before the death is noticed, the server sleeps, too.
    while server.metric("engine_restarts_total") < 1 or not all_sleep(server):
        assert time.monotonic() < until
        time.sleep(0.1)
    assert post(server, "/wake_up").json() == {"status": "awake"}
    thread.join(deadline(60))
    made = [*waits, *(complete(server) for _ in range(4))]
    assert [numbers(one) for one in made] == [numbers(before)] * 5
    assert {one["weight_version"] for one in made} == {"some"}
    assert post(server, "/sleep?level=2").status_code == 200
    server.process.terminate()
    assert server.process.wait(deadline(30)) == 0
