"""New weights over HTTP: all engine processes, streams across an update, engines that start again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e1.rig import MAX_LEN, make_checkpoint
from tests.support.long_streams import TOKENS, streams
from tests.support.new_weights import changed, read_tensors, write_checkpoint
from tests.support.pictures import image_file, image_part
from tests.support.processes import with_role
from tests.support.servers import Running, Servers
from tests.support.slowness import deadline
from tests.support.trainers import ADMIN, ARGUMENTS, PROMPT, complete, post
from weft import LLM, SamplingParams
from weft.config.hub import bundled_models
from weft.models.weight_source import write_shared
from weft.store.new_weights import SHARED
from weft.store.shared_files import new_token, shared_name

BASE = Path(bundled_models()["spool-text"])


def update(server: Running, folder: Path, label: str | None, **info: Any) -> httpx.Response:
    assert post(server, "/start_weight_update").status_code == 200
    assert post(server, "/update_weights", {"update_info": {"path": str(folder), **info}}).status_code == 200
    return post(server, "/finish_weight_update", {"weight_version": label})


def numbers(choice: dict[str, Any]) -> tuple[list[int], list[float]]:
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


@pytest.mark.slow
def test_one_engine(servers: Servers, tmp_path: Path) -> None:
    """Bodies, labels, refusals, and a stream across an update."""
    new = write_checkpoint(tmp_path / "new", BASE, changed(read_tensors(BASE), 1))
    bad = write_checkpoint(
        tmp_path / "bad", BASE, {"model.norm.weight": read_tensors(BASE)["model.norm.weight"]}
    )
    server = servers.weft(*ARGUMENTS)
    before = complete(server)
    assert "weight_version" not in before
    info = httpx.get(server.url + "/weight_info", headers=ADMIN).json()
    assert info == {"weight_version": "default", "version": 0}
    assert httpx.get(server.url + "/get_world_size", headers=ADMIN).json() == {"world_size": 1}
    known = httpx.get(server.url + "/server_info?config_format=json", headers=ADMIN).json()["vllm_config"]
    assert known["model_config"]["dtype"] == "torch.bfloat16"
    assert known["parallel_config"] == {"tensor_parallel_size": 1, "data_parallel_size": 1}
    assert known["lora_config"] is None
    assert post(server, "/init_weight_transfer_engine", {"init_info": {"backend": "nccl"}}).status_code == 400
    assert post(server, "/finish_weight_update").status_code == 400  # without a start
    refused = update(server, bad, "bad")
    assert refused.status_code == 400
    assert "missing: model.embed_tokens.weight" in refused.json()["error"]["message"]
    for wrong in ({"path": "relative"}, {"name": "../x.safetensors"}, {"path": str(new), "names": []}, {}):
        post(server, "/start_weight_update")
        assert post(server, "/update_weights", {"update_info": wrong}).status_code == 400
    assert numbers(complete(server)) == numbers(before)
    # A stream goes on across the update, and names both versions.
    with streams(server, PROMPT) as seen:
        assert update(server, new, "step-1").json() == {"message": "Weight update finished"}
    both = next(one for one in seen if one.change)
    assert both.last["weight_version"] == "step-1"
    assert both.last["weight_versions"] == [[0, "default"], [both.change, "step-1"]]
    assert len(both.ids) == TOKENS > both.change
    after = complete(server)
    assert after["weight_versions"] == [[0, "step-1"]]
    assert numbers(after) != numbers(before)
    assert post(server, "/update_weight_version", {"new_version": "named"}).json()["success"]
    assert complete(server)["weight_version"] == "named"
    assert update(server, BASE, None).status_code == 200
    assert numbers(complete(server)) == numbers(before)
    assert 'weft:weights_version{model_name="spool-text"} 2.0' in httpx.get(server.url + "/metrics").text


@pytest.mark.slow
@pytest.mark.parametrize("more", ["--data-parallel-size 2", "--prefill 1 --decode 1"])
def test_all_engines_change_and_one_that_starts_again_follows(
    servers: Servers, tmp_path: Path, more: str
) -> None:
    new = write_checkpoint(tmp_path / "new", BASE, changed(read_tensors(BASE), 1))
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    with LLM(str(new), dtype="bfloat16") as llm:
        due = list(llm.generate(PROMPT, params, use_tqdm=False)[0].outputs[0].token_ids)
    server = servers.weft(*ARGUMENTS, *more.split())
    before = [complete(server)["token_ids"] for _ in range(4)]
    shared = "--prefill" in more
    if shared:
        assert update(server, new, "early").status_code == 400
        assert post(server, "/pause?mode=keep").status_code == 200
    assert update(server, new, "step-1").status_code == 200
    if shared:
        assert post(server, "/resume").status_code == 200
    assert all(complete(server)["token_ids"] == due for _ in range(4))
    assert before[0] == before[1]
    groups = httpx.get(server.url + "/admin/groups", headers=ADMIN).json()["engines"]
    os.kill(server.engine(), signal.SIGKILL)
    until = time.monotonic() + deadline(60)
    while time.monotonic() < until:
        choice = complete(server)
        assert (choice["token_ids"], choice["weight_version"]) == (due, "step-1")
        alive = httpx.get(server.url + "/admin/groups", headers=ADMIN).json()["engines"]
        names = {one["incarnation"] for one in alive}
        if all(one["alive"] for one in alive) and names != {one["incarnation"] for one in groups}:
            break
        time.sleep(0.2)
    assert all(complete(server)["token_ids"] == due for _ in range(4))


@pytest.mark.slow
def test_a_replica_that_starts_again_computes_nothing_with_old_experts(
    servers: Servers, tmp_path: Path
) -> None:
    """The other replica waits until the experts of both have the same version."""
    (tmp_path / "made").mkdir()
    old = Path(make_checkpoint(tmp_path / "made", "qwen3_moe"))
    new = write_checkpoint(tmp_path / "new", old, changed(read_tensors(old), 1))
    more = {"tokenizer": "spool-text", "dtype": "float64", "max_model_len": MAX_LEN}
    ids = [(5 * i + 3) % 7 for i in range(20)]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    def alone(folder: Path) -> list[int]:
        with LLM(str(folder), **more) as llm:  # type: ignore[arg-type]
            return list(
                llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)[0].outputs[0].token_ids
            )

    due = [alone(old), alone(new)]
    assert due[0] != due[1]
    server = servers.weft(
        *(str(old), "--tokenizer", "spool-text", "--dtype", "float64", "--max-model-len", str(MAX_LEN)),
        *("--admin-key", "admin", "--threads", "1", "--max-num-seqs", "4", "--kv-cache-memory", "16M"),
        *("--data-parallel-size", "2", "--enable-expert-parallel"),
    )

    def made() -> list[int]:
        body = {"prompt": ids, "temperature": 0, "max_tokens": 8, "return_token_ids": True}
        answer = httpx.post(
            server.url + "/v1/completions", json=body | {"ignore_eos": True}, timeout=deadline(60)
        )
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    assert made() == made() == due[0]
    assert post(server, "/pause?mode=keep").status_code == 200
    assert update(server, new, "step-1").status_code == 200
    assert post(server, "/resume").status_code == 200
    assert made() == made() == due[1]
    groups = httpx.get(server.url + "/admin/groups", headers=ADMIN).json()["engines"]
    os.kill(server.engine(), signal.SIGKILL)
    until = time.monotonic() + deadline(90)
    while True:
        assert made() == due[1]
        alive = httpx.get(server.url + "/admin/groups", headers=ADMIN).json()["engines"]
        names = {one["incarnation"] for one in alive}
        if all(one["alive"] for one in alive) and names != {one["incarnation"] for one in groups}:
            break
        assert time.monotonic() < until
    assert [made() for _ in range(4)] == 4 * [due[1]]


@pytest.mark.slow
def test_prefill_and_decode_groups_share_blocks_of_each_version(servers: Servers, tmp_path: Path) -> None:
    """One folder, before and after an update, and after a restart of the server."""
    new = write_checkpoint(tmp_path / "new", BASE, changed(read_tensors(BASE), 1))
    disk = ("--kv-disk", "64M", "--kv-disk-dir", str(tmp_path / "kv"), "--kv-store", "all")
    more = ("--prefill", "1", "--decode", "1", "--block-size", "8", *disk)
    made, loads = [], []
    for _ in range(2):
        server = servers.weft(*ARGUMENTS, *more)
        for folder in (None, new, BASE):
            if folder is not None:
                assert post(server, "/pause?mode=keep").status_code == 200
                assert update(server, folder, None).status_code == 200
                assert post(server, "/resume").status_code == 200
            made.append(numbers(complete(server)))
            server.wait(lambda run=server: run.metric("kv_tier_blocks") > 0, 30)  # type: ignore[misc]
            post(server, "/reset_prefix_cache")
            assert numbers(complete(server)) == made[-1]
        loads.append(server.metric("kv_loads_total"))
        server.stop()
    assert made[0] == made[2] == made[3] == made[5]
    assert made[1] == made[4] != made[0]
    assert loads[1] > 0


@pytest.mark.slow
def test_all_api_servers_change(servers: Servers, tmp_path: Path) -> None:
    """Any API server takes any call. After the end of the one that carried the update out, another brings an
    engine process that starts again to the new weights."""
    new = write_checkpoint(tmp_path / "new", BASE, changed(read_tensors(BASE), 1))
    server = servers.weft(*ARGUMENTS, "--fronts", "2", "--data-parallel-size", "2")
    before = [numbers(complete(server)) for _ in range(6)]
    assert update(server, new, "step-1").status_code == 200
    after = [complete(server) for _ in range(6)]
    assert {one["weight_version"] for one in after} == {"step-1"}
    assert len({str(numbers(one)) for one in after}) == 1
    assert numbers(after[0]) != before[0]
    for _ in range(6):
        info = httpx.get(server.url + "/weight_info", headers=ADMIN).json()
        assert info == {"weight_version": "step-1", "version": 1}
    refused = update(server, tmp_path / "new" / "model.safetensors", "again", partial=True)
    assert refused.status_code == 200  # a complete file may come as a part
    first = min(with_role(server.process.pid, "front"))
    os.kill(first, signal.SIGKILL)
    os.kill(server.engine(), signal.SIGKILL)
    until = time.monotonic() + deadline(60)
    while time.monotonic() < until:
        try:
            found = complete(server)
        except httpx.HTTPError:
            time.sleep(0.2)
            continue
        assert (numbers(found), found["weight_version"]) == (numbers(after[0]), "again")
        alive = httpx.get(server.url + "/admin/groups", headers=ADMIN).json()["engines"]
        if all(one["alive"] for one in alive) and len(with_role(server.process.pid, "front")) == 2:
            break
        time.sleep(0.2)
    else:
        raise AssertionError("the engine did not come back")
    while (named := post(server, "/update_weight_version", {"new_version": "named"})).status_code == 503:
        assert time.monotonic() < until  # the API server that starts again does not listen yet
        time.sleep(0.2)
    assert named.status_code == 200
    found_labels = {complete(server)["weight_version"] for _ in range(8)}
    assert found_labels == {"named"}


@pytest.mark.slow
@pytest.mark.parametrize("fronts", [1, 2])
def test_one_of_several_models(servers: Servers, tmp_path: Path, fronts: int) -> None:
    """A body names the model. The updated model is pinned, and has its weights again after a loss of its
    engines, from a file that the server deletes; an operator's unload gives the weights of the files back."""
    tensors = read_tensors(BASE)
    one = write_checkpoint(tmp_path / "one", BASE, tensors)
    new = write_shared(shared_name(0, new_token()), changed(tensors, 1).items())
    server = servers.weft(
        *("spool-text", str(one), "--admin-key", "admin", "--dtype", "bfloat16", "--threads", "1"),
        *("--max-num-seqs", "4", "--engine-restarts", "0"),
        *("--fronts", str(fronts)),
    )

    def ask(model: str) -> dict[str, Any]:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True, "model": model}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=deadline(60))
        assert answer.status_code == 200, answer.text
        return dict(answer.json()["choices"][0])

    def call(path: str, body: Any) -> httpx.Response:
        return post(server, f"{path}?model=one", body)

    before = ask("one")
    assert ask("spool-text")["token_ids"] == before["token_ids"]
    assert post(server, "/start_weight_update").status_code == 400  # names no model
    assert call("/start_weight_update", {}).status_code == 200
    info = {"update_info": {"name": new}, "model": "one"}
    assert post(server, "/update_weights", info).status_code == 200
    assert call("/finish_weight_update", {"weight_version": "step-1"}).status_code == 200
    after = ask("one")
    assert (after["token_ids"] != before["token_ids"], after["weight_version"]) == (True, "step-1")
    assert ask("spool-text")["token_ids"] == before["token_ids"]
    models = {m["name"]: m for m in httpx.get(server.url + "/admin/models", headers=ADMIN).json()["models"]}
    assert (models["one"]["pinned"], models["spool-text"]["pinned"]) == (True, False)
    for pid in with_role(server.process.pid, "head"):
        os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + deadline(90)
    while time.monotonic() < until:
        body = {"prompt": PROMPT, "temperature": 0, "max_tokens": 8, "return_token_ids": True, "model": "one"}
        answer = httpx.post(server.url + "/v1/completions", json=body, timeout=deadline(60))
        if answer.status_code == 200:
            break
        time.sleep(0.5)
    again = answer.json()["choices"][0]
    assert (again["token_ids"], again["weight_version"]) == (after["token_ids"], "step-1")
    assert post(server, "/admin/models/unload", {"model": "one"}).status_code == 200
    while call("/start_weight_update", {}).status_code == 200:
        assert time.monotonic() < until
        time.sleep(0.1)
    assert call("/start_weight_update", {}).status_code == 503  # not loaded
    fresh = ask("one")
    assert fresh["token_ids"] == before["token_ids"]
    assert "weight_version" not in fresh
    while (SHARED / new).exists():  # each process releases the file by itself
        assert time.monotonic() < until
        time.sleep(0.1)


@pytest.mark.slow
def test_groups_that_encode_images_change(servers: Servers, tmp_path: Path) -> None:
    """The tower of an encode group, and the text part of another group, with one update."""
    folder = Path(bundled_models()["spool-vision"])
    tensors = read_tensors(folder)
    new = write_checkpoint(tmp_path / "new", folder, changed(tensors, 1))
    messages = [{"role": "user", "content": [image_part(image_file((64, 32), seed=1))]}]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)

    def alone(model: Path) -> list[int]:
        with LLM(str(model), dtype="float32") as llm:
            return list(llm.chat(messages, params, use_tqdm=False)[0].outputs[0].token_ids)

    due = [alone(folder), alone(new)]
    assert due[0] != due[1]
    server = servers.weft(
        *("spool-vision", "--admin-key", "admin", "--dtype", "float32", "--threads", "1"),
        *("--max-num-seqs", "4", "--encode", "1"),
    )

    def seen() -> list[int]:
        body = {"messages": messages, "temperature": 0, "max_tokens": 6, "ignore_eos": True}
        body |= {"return_token_ids": True}
        answer = httpx.post(server.url + "/v1/chat/completions", json=body, timeout=deadline(60))
        assert answer.status_code == 200, answer.text
        return list(answer.json()["choices"][0]["token_ids"])

    assert seen() == seen() == due[0]
    assert update(server, new, "early").status_code == 400  # only during a pause
    for path, expected in ((new, due[1]), (folder, due[0])):
        assert post(server, "/pause?mode=keep&clear_cache=false").status_code == 200
        assert update(server, path, None).status_code == 200
        assert post(server, "/resume").status_code == 200
        assert seen() == expected
