"""Token ids in, token ids out, and requests rendered to token ids: over a scripted engine and a model."""

from __future__ import annotations

import asyncio
import base64
import io
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from weft.common.errors import InvalidRequest
from weft.front.protocol.conversation import AnswerOptions
from weft.front.protocol.npy import from_npy, to_npy
from weft.front.requests import serving
from weft.front.requests.read_sequences import read_sequences
from weft.front.requests.reading import Job, Reader
from weft.types.routes import RouteShape
from weft.types.sampling import SamplingParams, TokenParams

ROUTE = "/inference/v1/generate"
IDS = [97, 98, 99]
MESSAGES = [{"role": "user", "content": "Tom has 12 apples and buys 7 more. How many apples does he have?"}]


def generate(server: Any, sampling: dict[str, Any] | None = None, **fields: Any) -> httpx.Response:
    body = {"token_ids": IDS, "sampling_params": sampling or {}, **fields}
    return server.http.post(ROUTE, json=body)


@pytest.mark.requirement("F68")
def test_a_whole_answer(fake: Any) -> None:
    got = generate(fake, {"max_tokens": 4, "n": 2}, request_id="mine", return_token_ids=True).json()
    assert (got["request_id"], got["output_mode"], got["model"]) == ("mine", "tokens", "fake")
    for index in (0, 1):
        assert got["choices"][index] == {
            "index": index,
            "token_ids": [97, 98, 99, 97],
            "finish_reason": "length",
            "stop_reason": None,
            "logprobs": None,
        }
    assert got["prompt_token_ids"] == IDS
    assert got["kv_transfer_params"] is None
    assert (got["usage"]["prompt_tokens"], got["usage"]["completion_tokens"]) == (3, 8)
    assert generate(fake, {"max_tokens": 1}).json()["request_id"].startswith("generate-")


def test_the_default_length_is_the_free_context(fake: Any) -> None:
    ids = IDS * 170
    assert generate(fake, token_ids=ids).json()["usage"]["completion_tokens"] == 2


@pytest.mark.requirement("F68")
def test_a_stream(fake: Any, sse: Any) -> None:
    body: dict[str, Any] = {"token_ids": IDS, "sampling_params": {"max_tokens": 5, "logprobs": 1}}
    body |= {"request_id": "r", "return_token_ids": True, "stream_options": {"include_usage": True}}
    with fake.stream(ROUTE, **body) as answer:
        *chunks, last, done = sse(answer)
    assert done == "[DONE]"
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 5)
    assert {chunk["request_id"] for chunk in chunks} == {"r"}
    choices = [chunk["choices"][0] for chunk in chunks]
    assert [token for choice in choices for token in choice["token_ids"]] == [97, 98, 99, 97, 98]
    assert [choice["finish_reason"] for choice in choices][-2:] == [None, "length"]
    assert [chunk.get("prompt_token_ids") for chunk in chunks][:2] == [IDS, None]
    logprobs = [one for choice in choices if choice["logprobs"] for one in choice["logprobs"]["content"]]
    assert [one["token_id"] for one in logprobs] == [97, 98, 99, 97, 98]
    first = logprobs[0]
    assert (first["token"], first["logprob"], first["rank"]) == ("token_id:97", -0.5, 1)
    assert first["top_logprobs"][0]["token_id"] == 97


def test_text_on_request(fake: Any) -> None:
    got = generate(fake, {"max_tokens": 4, "logprobs": 0}, output_mode="text").json()
    choice = got["choices"][0]
    assert (got["output_mode"], choice["text"]) == ("text", "abca")
    assert choice["logprobs"]["content"][0]["token"] == "a"


def test_stop_strings_count_in_the_whole_output(fake: Any) -> None:
    got = generate(fake, {"max_tokens": 9, "stop": ["ca"]}).json()["choices"][0]
    assert (got["token_ids"], got["finish_reason"], got["stop_reason"]) == ([97, 98, 99, 97], "stop", "ca")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": [300]}, "token_ids"),
        ({"token_ids": "abc"}, "token_ids"),
        ({"token_ids": [97] * 600}, "token_ids"),
        ({"sampling_params": {"temperature": -1}}, "temperature"),
        ({"sampling_params": {"max_tokens": 600}}, "max_tokens"),
        ({"sampling_params": {"model": "fake"}}, "model"),
        ({"sampling_params": {"made_up": 1}}, "made_up"),
        ({"sampling_params": {"logprobs": -1}}, "logprobs"),
        ({"sampling_params": {"repetition_detection": {"min_count": 3}}}, "repetition_detection"),
        ({"sampling_params": {"stop": ["a"], "detokenize": False}}, "stop"),
        ({"sampling_params": {"prompt_logprobs": 1}, "stream": True}, "prompt_logprobs"),
        ({"sampling_params": {"detokenize": False}, "output_mode": "text"}, "output_mode"),
        ({"sampling_params": None}, "sampling_params"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"request_id": "a b"}, "request_id"),
        ({"features": {"mm_hashes": {"image": ["a"]}}}, "features"),
        ({"content_parts": [{"type": "text"}]}, "content_parts"),
        ({"kv_transfer_params": {"do_remote_prefill": True}}, "kv_transfer_params"),
        ({"made_up": 1}, "made_up"),
        ({"cache_salt": "a b"}, "cache_salt"),
    ],
)
def test_wrong_requests_are_refused_by_name(fake: Any, fields: dict[str, Any], param: str) -> None:
    answer = fake.http.post(ROUTE, json={"token_ids": IDS, "sampling_params": {}, **fields})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


def test_an_unknown_model_is_not_found(fake: Any) -> None:
    assert generate(fake, model="other").status_code == 404


def test_parameters_as_vllm_writes_them_pass(fake: Any) -> None:
    """All of these follow from other fields, or ask for nothing."""
    sampling = {
        "max_tokens": 2,
        "output_kind": 2,
        "skip_clone": True,
        "detokenize": True,
        "extra_args": None,
        "flat_logprobs": False,
        "output_text_buffer_length": 0,
        "thinking_token_budget": -1,
        "structured_outputs": None,
        "_all_stop_token_ids": [],
    }
    more = {
        "features": None,
        "token_offsets": [[0, 1]],
        "assistant_tokens_mask": [0],
        "kv_transfer_params": {},
    }
    answer = generate(fake, sampling, priority=3, cache_salt="x", reasoning_ended=None, **more)
    assert answer.status_code == 200, answer.text


NO_TRANSFER = {
    "do_remote_prefill": False,
    "do_remote_decode": False,
    "remote_engine_id": None,
    "remote_block_ids": [],
    "remote_host": None,
}


@pytest.mark.requirement("F25")
def test_transfer_parameters_that_ask_for_no_transfer_pass(fake: Any) -> None:
    for params in (None, {}, NO_TRANSFER):
        assert fake.chat(kv_transfer_params=params, max_tokens=2).status_code == 200
        assert fake.complete(kv_transfer_params=params, max_tokens=2).status_code == 200
        assert generate(fake, {"max_tokens": 2}, kv_transfer_params=params).status_code == 200


@pytest.mark.requirement("F25")
@pytest.mark.parametrize(
    "params",
    [
        {"do_remote_decode": True},
        {**NO_TRANSFER, "remote_block_ids": [1]},
        {**NO_TRANSFER, "remote_host": "10.0.0.1"},
        {**NO_TRANSFER, "remote_port": 0},
        {"do_remote_decode": 0},
        "yes",
    ],
)
def test_other_transfer_parameters_are_refused_with_a_way_out(fake: Any, params: Any) -> None:
    for answer in (
        fake.chat(kv_transfer_params=params),
        fake.complete(kv_transfer_params=params),
        generate(fake, kv_transfer_params=params),
    ):
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (400, "unsupported_parameter")
        assert error["param"] == "kv_transfer_params"
        assert "--prefill" in error["message"]


def test_a_closed_connection_ends_the_sequence(fake: Any) -> None:
    before = fake.metric("num_preemptions_total")
    with fake.stream(ROUTE, token_ids=IDS, sampling_params={"max_tokens": 500, "seed": 7}) as answer:
        next(answer.iter_lines())
    fake.wait(lambda: fake.metric("num_preemptions_total") > before)


@pytest.mark.requirement("F68")
def test_chat_rendered_and_generated_is_chat(weft_server: Any) -> None:
    """A router may render a request here, and generate the tokens there."""
    fields = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40, "cache_salt": "s", "priority": 2}
    rendered = weft_server.http.post("/v1/chat/completions/render", json=fields).json()
    assert rendered["request_id"].startswith("chatcmpl-")
    assert rendered["sampling_params"] == {"temperature": 0, "max_tokens": 40}
    assert (rendered["cache_salt"], rendered["priority"], rendered["stream"]) == ("s", 2, False)
    tokens = weft_server.http.post("/tokenize", json={"messages": MESSAGES}).json()["tokens"]
    assert rendered["token_ids"] == tokens
    answer = weft_server.http.post(ROUTE, json=rendered).json()
    assert answer["request_id"] == rendered["request_id"]
    chat = weft_server.http.post("/v1/chat/completions", json={**fields, "return_token_ids": True}).json()
    assert answer["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert answer["choices"][0]["finish_reason"] == chat["choices"][0]["finish_reason"]


@pytest.mark.requirement("F68")
@pytest.mark.parametrize(
    "form",
    [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"enum": ["x"]}}}},
        {"structured_outputs": {"choice": ["x", "y"]}},
        {"guided_regex": "[xy]{3}"},
    ],
)
def test_a_rendered_output_format_holds(weft_server: Any, form: dict[str, Any]) -> None:
    for route, body in (
        ("/v1/chat/completions", {"messages": MESSAGES}),
        ("/v1/completions", {"prompt": "Once"}),
    ):
        body = {**body, **form, "temperature": 0, "max_tokens": 12, "return_token_ids": True}
        rendered = weft_server.http.post(route + "/render", json=body).json()
        (rendered,) = rendered if isinstance(rendered, list) else [rendered]
        answer = weft_server.http.post(ROUTE, json={**rendered, "output_mode": "text"}).json()["choices"][0]
        direct = weft_server.http.post(route, json=body).json()["choices"][0]
        assert answer["token_ids"] == direct["token_ids"]
        assert answer["text"].strip('"')[:1] in ("x", "y")


def test_completions_are_rendered_one_by_one(fake: Any) -> None:
    body = {"prompt": ["ab", "c"], "max_tokens": 3, "seed": 5, "stop": "z", "logit_bias": {"5": 1.5}, "n": 2}
    got = fake.http.post("/v1/completions/render", json=body).json()
    assert [one["token_ids"] for one in got] == [[97, 98], [99]]
    for one in got:
        sampling = {"n": 2, "logit_bias": {"5": 1.5}, "max_tokens": 3, "stop": ["z"], "seed": 5}
        assert one["sampling_params"] == sampling
        assert fake.http.post(ROUTE, json=one).status_code == 200
    alone = fake.http.post("/v1/completions/render", json={"prompt": "ab"}).json()
    assert alone[0]["sampling_params"] == {"max_tokens": 16}


def test_copies_of_parameters_are_bounded(start_fake: Any) -> None:
    """Each prompt gets a copy of the parameters, so a small body could ask for a large answer."""
    server = start_fake(max_response_bytes=20_000)
    body = {"allowed_token_ids": list(range(256))}
    answer = server.http.post("/v1/completions/render", json={**body, "prompt": ["a"] * 40})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "response_too_large")
    assert answer.json()["error"]["param"] == "prompt"
    got = server.http.post("/v1/completions/render", json={**body, "prompt": ["a"] * 10}).json()
    assert len(got) == 10
    assert got[9]["sampling_params"]["allowed_token_ids"] == list(range(256))


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}, "strict": True}}


@pytest.mark.parametrize(
    ("route", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": MESSAGES, "tools": [TOOL], "tool_choice": "required"}, "tools"),
        ("/v1/chat/completions", {"messages": []}, "messages"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 600}]}, "messages"),
        ("/v1/completions", {"prompt": "a", "echo": True}, "echo"),
        ("/v1/completions", {"prompt": [[999]]}, "prompt"),
    ],
)
def test_requests_that_cannot_be_rendered(fake: Any, route: str, body: dict[str, Any], param: str) -> None:
    answer = fake.http.post(route + "/render", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.requirement("F60")
def test_the_routes_are_described(fake: Any) -> None:
    document = fake.http.get("/openapi.json").json()
    for path in (ROUTE, "/v1/chat/completions/render", "/v1/completions/render"):
        assert "post" in document["paths"][path]
    answers = document["paths"]["/v1/completions/render"]["post"]["responses"]["200"]["content"]
    assert answers["application/json"]["schema"]["type"] == "array"
    assert document["components"]["schemas"]["GenerateRequest"]["required"] == [
        "token_ids",
        "sampling_params",
    ]


def array_of(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)))


def test_routed_experts_and_logprobs_as_arrays(weft_server: Any) -> None:
    """Replayed with the same experts, and scored as decoded."""
    sampling = {"max_tokens": 6, "seed": 3, "logprobs": 4, "n": 2, "return_routed_experts": True}
    got = generate(weft_server, sampling, return_binary="float32").json()
    one, two = got["choices"]
    arrays = {name: array_of(text) for name, text in one["binary_logprobs"].items()}
    assert arrays["logprobs"].shape == arrays["token_ids"].shape == (6, 4)
    assert (one["logprobs"], got["prompt_logprobs"]) == (None, None)
    routes, other = (array_of(choice["routed_experts"]) for choice in (one, two))
    tokens = len(IDS) + 5
    assert routes.dtype == np.uint8
    assert routes.shape[0] == other.shape[0] == tokens
    assert routes[: len(IDS)].tolist() == other[: len(IDS)].tolist()
    forced = {**sampling, "n": 1, "force_routed_experts": one["routed_experts"]}
    again = generate(weft_server, forced, return_binary="float32").json()["choices"][0]
    for name in ("token_ids", "routed_experts", "binary_logprobs"):
        assert again[name] == one[name]
    whole = {"sequences": [IDS + one["token_ids"]], "prompt_lengths": [len(IDS)], "top_logprobs": 4}
    scored = weft_server.http.post("/get_sequence_logprobs/", json={**whole, "response_format": "binary"})
    found = scored.json()
    made = np.frombuffer(base64.b64decode(found["logprobs_b64"]), "<f4").reshape(found["shape"])
    assert found["completion_lengths"] == [6]
    assert made[0].tolist() == arrays["logprobs"].tolist()
    more = {
        **whole,
        "sequences": [IDS, *whole["sequences"]],
        "prompt_lengths": [0, len(IDS)],
        "response_format": "binary",
    }
    both = weft_server.http.post("/get_sequence_logprobs/", json=more).json()
    made = np.frombuffer(base64.b64decode(both["logprobs_b64"]), "<f4").reshape(both["shape"])
    own = np.frombuffer(base64.b64decode(both["actual_token_ids_b64"]), "<i4").reshape(2, 6)
    assert both["completion_lengths"] == [3, 6]
    assert made[1].tolist() == arrays["logprobs"].tolist()
    assert np.isneginf(made[0, [0, 3, 4, 5]]).all()
    assert np.isfinite(made[0, 1:3]).all()
    assert own.tolist() == [[0, *IDS[1:], 0, 0, 0], one["token_ids"]]
    many = weft_server.http.post("/get_sequence_logprobs", json={**whole, "top_logprobs": 21})
    assert (many.status_code, many.json()["error"]["param"]) == (400, "top_logprobs")
    made = made[1:]
    listed = weft_server.http.post("/get_sequence_logprobs", json=whole).json()
    assert np.array([row[:4] for row in listed["logprobs"][0]], np.float32).tolist() == made[0].tolist()
    assert [len(row) for row in listed["logprob_token_ids"][0]] == [len(row) for row in listed["logprobs"][0]]


def test_more_logprobs_than_the_server_allows(weft_server: Any) -> None:
    for sampling, fields, param in (
        ({"logprobs": 21}, {}, "logprobs"),
        ({"prompt_logprobs": -1}, {}, "prompt_logprobs"),
        ({"logprobs": -1}, {"return_binary": "float16"}, "logprobs"),
        ({"logprobs": 1}, {"return_binary": "float16", "stream": True}, "return_binary"),
        ({"return_routed_experts": True}, {"stream": True}, "return_routed_experts"),
        ({"force_routed_experts": to_npy(np.zeros((2, 1, 1), int))}, {}, "force_routed_experts"),
    ):
        answer = generate(weft_server, sampling, **fields)
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == param


def test_arrays_in_a_request_take_no_more_memory_than_the_request() -> None:
    small = np.arange(24, dtype=np.uint16).reshape(4, 3, 2)
    assert from_npy(to_npy(small), "x").tolist() == small.tolist()
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, {"descr": "<u2", "fortran_order": False, "shape": (1 << 40,)})
    floats = to_npy(np.zeros(3))
    for wrong in ("", "AAAA", "*", json.dumps([1]), floats, base64.b64encode(file.getvalue()).decode()):
        with pytest.raises(InvalidRequest, match="x must be base64 of a"):
            from_npy(wrong, "x")


@pytest.mark.parametrize(
    "header", ["(((", "{'descr': '<i4'", '"""', "-" * 9000, "{'descr': ((((((),),),),),)}", "{'shape': (1,)}"]
)
def test_a_header_of_an_array_is_not_run(header: str) -> None:
    data = header.encode() + b"\n"
    file = b"\x93NUMPY\x01\x00" + len(data).to_bytes(2, "little") + data
    with pytest.raises(InvalidRequest, match="x must be base64 of a"):
        from_npy(base64.b64encode(file).decode(), "x")


@pytest.mark.parametrize("shape", [(3,), (2, 3), (1, 2, 3), ()])
@pytest.mark.parametrize("dtype", ["u1", "<u2", ">i4", "<i8"])
def test_arrays_as_numpy_saves_them(shape: tuple[int, ...], dtype: str) -> None:
    file = io.BytesIO()
    made = np.ones(shape, dtype)
    np.save(file, made)
    assert from_npy(base64.b64encode(file.getvalue()).decode(), "x").tolist() == made.tolist()


def test_an_empty_piece_does_not_end_an_answer() -> None:
    """Base64 of a whole number of three bytes ends with an empty piece."""

    class Front:
        async def in_thread(self, make: Callable[[], bytes]) -> bytes:
            return make()

    class Generation:
        def succeeded(self) -> None:
            pass

    async def collect() -> list[bytes]:
        pieces = iter([b"a" * serving.PIECE, b"", b"", b"end"])
        front: Any = Front()
        generation: Any = Generation()
        return [piece async for piece in serving._pieces(front, generation, pieces)]

    assert b"".join(asyncio.run(collect())).endswith(b"end")


def test_sequences_of_unequal_lengths_do_not_pad_without_bound() -> None:
    """Two forms of one request: only arrays are padded to the longest completion."""
    unequal = {"sequences": [[1] * 900, *[[1]] * 99], "prompt_lengths": [0] * 100, "top_logprobs": 20}
    reader: Any = SimpleNamespace(named=lambda asked: asked, max_response_bytes=1 << 20)
    reader.scored = lambda *_: Job(
        prompts=[], params=SamplingParams(), token_params=TokenParams(), asked=None, continues=True, param=""
    )
    read_sequences(reader, json.dumps(unequal).encode())
    with pytest.raises(InvalidRequest, match="similar lengths"):
        read_sequences(reader, json.dumps({**unequal, "response_format": "binary"}).encode())


def test_routes_of_prompts_count_before_any_computation() -> None:
    """Every choice shows the routes of the prompt."""
    shape = RouteShape(layers=4, top_k=2, experts=8)
    reader: Any = SimpleNamespace(limits=SimpleNamespace(routes=shape), max_response_bytes=16 * 100 * 2)
    prompts: Any = [SimpleNamespace(count=100)]
    asked = AnswerOptions(model="", stream=False)

    def check(**more: Any) -> None:
        params = SamplingParams(return_routed_experts=True, **more)
        Reader._check_answer(reader, prompts, params, asked, "prompt")

    check(n=2)
    check(n=3, routed_experts_prompt_start=50)
    with pytest.raises(InvalidRequest, match="max-response-bytes") as caught:
        check(n=3)
    assert caught.value.param == "return_routed_experts"
