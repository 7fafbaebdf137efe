"""New weights that a trainer broadcasts over gloo: the same bits, and the old weights after every failure."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.canary import tree
from tests.support.long_streams import TOKENS, streams
from tests.support.new_weights import changed, read_tensors, write_checkpoint
from tests.support.processes import with_role
from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from tests.support.trainers import (
    ARGUMENTS,
    PROMPT,
    Trainer,
    beside,
    complete,
    dying_trainer,
    free_port,
    group_info,
    post,
)
from weft.config.hub import bundled_models
from weft.models.weight_group import announce, send, update_info
from weft.store.new_weights import SHARED

BASE = Path(bundled_models()["spool-text"])
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "training-loops.md"


def scored(server: Running, seed: int) -> list[float]:
    """Return logprobs of sampled tokens, after a check that scoring gives the same bits."""
    made = complete(server, temperature=1, seed=seed, max_tokens=16)
    tokens = made["token_ids"]
    ids = [*made["prompt_token_ids"], *tokens]
    score = complete(server, prompt=ids, max_tokens=1, prompt_logprobs=0)["prompt_logprobs"]
    again = [
        float(one[str(token)]["logprob"]) for token, one in zip(tokens, score[-len(tokens) :], strict=True)
    ]
    assert again == made["logprobs"]["token_logprobs"]
    return again


RECEIVED = re.compile(r"weft-\d-[0-9a-f]{16}\.safetensors")


def ours(server: Running) -> set[str]:
    """Return the names of received files that a process of the server has open. Other tests have such files
    at the same time."""
    found = set()
    for process in tree(server.process.pid):
        with contextlib.suppress(OSError):
            for opened in Path(f"/proc/{process.pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    place = Path(os.readlink(opened))
                    if place.parent == SHARED and re.fullmatch(
                        r"weft-\d-[0-9a-f]{16}\.safetensors", place.name
                    ):
                        found.add(place.name)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--tensor-parallel-size 2", "--data-parallel-size 2"])
def test_rollouts_equal_scoring_after_updates(servers: Servers, more: str) -> None:
    """Packed and unpacked, whole and in parts. Files end with the server."""
    server = servers.weft(*ARGUMENTS, *more.split())
    files: set[str] = set()
    old = read_tensors(BASE)
    before = scored(server, 0)
    trainer = Trainer(server)
    seen = [before]
    for step in range(4):
        new = changed(old, step, 0.1)
        assert trainer.update(new, f"step-{step}", packed=step % 2 == 1).status_code == 200
        assert complete(server)["weight_version"] == f"step-{step}"
        seen.append(scored(server, 0))
        assert len(ours(server)) == 1
        files |= ours(server)
    assert all(one != other for one, other in itertools.pairwise(seen))
    layer = {name: tensor for name, tensor in changed(old, 9).items() if ".layers.1.self_attn." in name}
    assert trainer.update(layer, partial=True).status_code == 200
    assert scored(server, 0) != seen[-1]
    assert len(ours(server)) == 2
    files |= ours(server)
    assert trainer.update(old, packed=True).status_code == 200
    assert scored(server, 0) == before
    server.stop()
    assert [name for name in files if (SHARED / name).exists()] == []


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--tensor-parallel-size 2"])
def test_a_failed_broadcast_leaves_the_old_weights(servers: Servers, more: str) -> None:
    """A trainer that never joins, dies between two tensors, is silent, or sends other bytes."""
    server = servers.weft(*ARGUMENTS, *more.split())
    ranks = 2 if more else 1
    before = complete(server)["token_ids"]
    old = read_tensors(BASE)
    new = changed(old, 1)

    def refused(answer: httpx.Response, status: int, why: str) -> None:
        assert answer.status_code == status, answer.text
        assert why in answer.json()["error"]["message"]
        assert complete(server)["token_ids"] == before
        assert ours(server) == set()

    never = group_info(free_port(), ranks, timeout=2)
    refused(post(server, "/init_weight_transfer_engine", {"init_info": never}), 503, "did not")
    dying = group_info(free_port(), ranks)
    process = dying_trainer(dying, BASE, 3)
    assert post(server, "/init_weight_transfer_engine", {"init_info": dying}).status_code == 200
    post(server, "/start_weight_update")
    body = {"update_info": update_info(announce(old.items()))}
    refused(post(server, "/update_weights", body), 503, "has ended")
    process.join(deadline(30))
    assert post(server, "/finish_weight_update").status_code == 400
    refused(post(server, "/update_weights", body), 400, "init_weight_transfer_engine")

    silent = Trainer(server, timeout=2)
    post(server, "/start_weight_update")
    refused(post(server, "/update_weights", body), 503, "did not")
    del silent

    name, tensor = next(iter(new.items()))
    for sent, why in (
        (tensor.new_zeros(2 * tensor.numel()), "more bytes than announced"),
        (tensor.flatten()[: tensor.numel() // 2].clone(), "fewer bytes than announced"),
        (tensor + 1, "other bytes than its digest"),
    ):
        trainer = Trainer(server)
        post(server, "/start_weight_update")
        announced = announce([(name, tensor)])
        told = {"update_info": update_info(announced)}
        with beside(lambda told=told: post(server, "/update_weights", told)) as answers:
            trainer.group.broadcast(sent)
        refused(answers[0], 400, why)

    trainer = Trainer(server)
    wrong = {("model.other" if one == name else one): tensor for one, tensor in new.items()}
    refused(trainer.update(wrong), 400, "missing")
    assert trainer.update(new, "next").status_code == 200  # in the same group
    after = complete(server)
    assert after["weight_version"] == "next"
    assert after["token_ids"] != before


@pytest.mark.slow
def test_a_rank_killed_amid_a_broadcast(servers: Servers) -> None:
    """The update fails or is carried out, and the next one is carried out."""
    server = servers.weft(*ARGUMENTS, "--tensor-parallel-size", "2")
    before = complete(server)["token_ids"]
    old = read_tensors(BASE)
    new = list(changed(old, 1).items())
    trainer = Trainer(server)
    post(server, "/start_weight_update")
    announced = announce(new)
    told = {"update_info": update_info(announced)}
    with beside(lambda: post(server, "/update_weights", told)) as answers:
        trainer.group.broadcast(new[0][1])
        os.kill(server.engine(), signal.SIGKILL)
    assert answers[0].status_code == 503, answers[0].text
    assert complete(server)["token_ids"] == before
    trainer = Trainer(server)
    assert trainer.update(dict(new), "next").status_code == 200
    due = complete(server)["token_ids"]
    assert due != before
    assert post(server, "/start_weight_update").status_code == 200
    old_again = announce(old.items(), packed=True)
    told = {"update_info": update_info(old_again)}
    with beside(lambda: post(server, "/update_weights", told)) as answers:
        os.kill(with_role(server.process.pid, "rank")[-1], signal.SIGKILL)
        send(trainer.group, list(old.items()), old_again)
    assert answers[0].status_code == 200
    answer = post(server, "/finish_weight_update", {"weight_version": "again"})
    assert answer.status_code in (200, 503)  # 503: the rank was lost while the weights were read
    again = answer.status_code == 200
    assert complete(server)["token_ids"] == (before if again else due)
    if again:
        assert trainer.update(dict(new), "next").status_code == 200
    assert complete(server)["token_ids"] == due
    os.kill(server.engine(), signal.SIGKILL)  # the next process reads the received file
    assert complete(server)["token_ids"] == due
    assert complete(server)["weight_version"] == "next"


@pytest.mark.slow
@pytest.mark.parametrize("way", ["keep", "recompute", "abort"])
def test_running_requests_keep_recompute_or_end(servers: Servers, tmp_path: Path, way: str) -> None:
    """After ``recompute``, a stream goes on as a new request of its tokens under the new weights."""
    new = write_checkpoint(tmp_path / "new", BASE, changed(read_tensors(BASE), 1))
    server = servers.weft(*ARGUMENTS, "--on-update", way)
    post(server, "/start_weight_update")
    post(server, "/update_weights", {"update_info": {"path": str(new)}})
    with streams(server, PROMPT) as seen:
        assert post(server, "/finish_weight_update", {"weight_version": "next"}).status_code == 200
    both = [one for one in seen if one.change]
    if way == "abort":
        ended = [one for one in seen if one.last["finish_reason"] == "abort"]
        assert ended
        assert both == []
        assert all(len(one.ids) < TOKENS and one.last["weight_version"] == "default" for one in ended)
        return
    first = min(both, key=lambda one: one.change)
    assert len(first.ids) == TOKENS
    assert first.last["weight_versions"] == [[0, "default"], [first.change, "next"]]
    prompt = complete(server, max_tokens=1)["prompt_token_ids"]
    rest = first.ids[first.change :][:200]
    fresh = complete(server, prompt=[*prompt, *first.ids[: first.change]], max_tokens=len(rest))["token_ids"]
    assert (rest == fresh) is (way == "recompute")


@pytest.mark.slow
def test_the_transfer_of_the_guide(servers: Servers) -> None:
    section = GUIDE.read_text().split("### Broadcasts of a trainer")[1].split("\n### ")[0]
    names: dict[str, Any] = {}
    exec(section.split("```python\n")[1].split("```")[0], names)
    server = servers.weft(*ARGUMENTS)
    before = complete(server)["token_ids"]
    transfer = names["BroadcastTransfer"](server.url, "admin", "127.0.0.1", free_port())
    old = read_tensors(BASE)
    transfer.send(changed(old, 1).items(), "guide")
    made = complete(server)
    assert (made["weight_version"], made["token_ids"] == before) == ("guide", False)
    transfer.send(old.items(), "back")
    assert complete(server)["token_ids"] == before
