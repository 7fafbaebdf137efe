"""``LLM`` on a real engine: order, shapes, stops, errors, and an idle engine afterwards."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import weft
from tests.support.slowness import deadline
from weft import LLM, RequestOutput, SamplingParams
from weft.common.errors import ConfigError, ContextLength, EngineDead, InvalidRequest
from weft.engine.core import EngineCore
from weft.runner.runner import Runner
from weft.scheduler import Scheduler
from weft.types.messages import Submit, TokenEvent

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
PROMPTS: list[Any] = [
    "Tom has 3 pens.",
    {"prompt": "Ann buys"},
    {"prompt_token_ids": [40, 50, 60]},
    "7 + 5 =",
]


def run(llm: LLM, prompts: Any, params: Any = GREEDY) -> list[RequestOutput]:
    made = llm.generate(prompts, params, use_tqdm=False)
    stats = llm._core.stats()  # type: ignore[union-attr]
    assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0)
    return made


def test_outputs_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    together = run(llm, PROMPTS)
    alone = [run(llm, prompt)[0] for prompt in PROMPTS]
    for one, other, prompt in zip(together, alone, PROMPTS, strict=True):
        assert one.outputs == other.outputs
        assert one.prompt_token_ids == other.prompt_token_ids
        assert one.prompt == (prompt if isinstance(prompt, str) else prompt.get("prompt"))
        assert one.finished
        assert len(one.outputs[0].token_ids) == 12
        assert one.outputs[0].text == llm.tokenizer.decode(one.outputs[0].token_ids)
        assert one.outputs[0].finish_reason == "length"
        assert one.outputs[0].logprobs is None
        assert one.prompt_logprobs is None


def test_prompts_of_a_call_are_one_client(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices of a prompt therefore run side by side and do not displace each other."""
    core, owners = llm._core, list[int]()
    assert core is not None
    submit = core.submit

    def watched(one: Submit) -> Any:
        owners.append(one.owner)
        return submit(one)

    monkeypatch.setattr(core, "submit", watched)
    for _ in range(2):
        run(llm, PROMPTS, SamplingParams(temperature=0, max_tokens=2, n=2))
    first, second = set(owners[:8]), set(owners[8:])
    assert len(first) == len(second) == 1
    assert first != second


def test_priority_orders_the_prompts_of_a_call(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    core = llm._core
    assert core is not None
    seen: list[int] = []
    submit = core.submit

    def watched(one: Submit) -> Any:
        seen.append(one.priority)
        return submit(one)

    monkeypatch.setattr(core, "submit", watched)
    alike = run(llm, PROMPTS)
    assert seen == [0] * 4
    ranked = llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[3, -1, 0, 3])
    assert seen[4:] == [3, -1, 0, 3]
    assert [r.outputs for r in ranked] == [r.outputs for r in alike]
    with pytest.raises(InvalidRequest, match="4 prompts but 2 priorities"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False, priority=[1, 2])
    with pytest.raises(InvalidRequest, match="priority must be an integer"):
        llm.generate("a", GREEDY, use_tqdm=False, priority=1 << 70)
    with pytest.raises(InvalidRequest, match="priority must be an integer"):
        llm.generate("a", GREEDY, use_tqdm=False, priority=None)  # type: ignore[arg-type]


def test_no_prompts_give_no_outputs(llm: LLM) -> None:
    assert run(llm, []) == []


def test_parameters_for_each_prompt(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=size, ignore_eos=True) for size in (1, 2, 3)]
    made = run(llm, ["a", "b", "c"], params)
    assert [len(output.outputs[0].token_ids) for output in made] == [1, 2, 3]
    with pytest.raises(InvalidRequest, match="2 prompts but 3"):
        run(llm, ["a", "b"], params)
    with pytest.raises(InvalidRequest, match="sampling_params"):
        run(llm, ["a"], {"max_tokens": 3})


def test_choices_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=3, seed=5, max_tokens=6, ignore_eos=True, logprobs=2, prompt_logprobs=1)
    made = run(llm, ["Tom has 3 pens and 4 cups."], params)[0]
    assert [output.index for output in made.outputs] == [0, 1, 2]
    assert len({tuple(output.token_ids) for output in made.outputs}) == 3
    assert made.prompt_logprobs is not None
    assert len(made.prompt_logprobs) == len(made.prompt_token_ids)
    assert made.prompt_logprobs[0] is None
    for token, entry in zip(made.prompt_token_ids[1:], made.prompt_logprobs[1:], strict=True):
        assert entry is not None
        assert next(iter(entry)) == token
    for output in made.outputs:
        assert output.logprobs is not None
        for token, position in zip(output.token_ids, output.logprobs, strict=True):
            assert next(iter(position)) == token
            assert 2 <= len(position) <= 3
            assert position[token].logprob <= 0
            assert position[token].decoded_token == llm.tokenizer.token_text(token)
    assert run(llm, ["x"], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs == [None]


def test_seeds_decide(llm: LLM, settings: dict[str, Any]) -> None:
    params = SamplingParams(max_tokens=8, ignore_eos=True, seed=9)
    assert run(llm, ["a"], params)[0].outputs == run(llm, ["a"], params)[0].outputs
    free = SamplingParams(max_tokens=8, ignore_eos=True)
    with LLM(**settings) as one, LLM(**settings) as two:
        first = [output.outputs[0].token_ids for output in run(one, ["a", "a", "a"], free)]
        assert first == [output.outputs[0].token_ids for output in run(two, ["a", "a", "a"], free)]
    assert len(set(map(tuple, first))) == 3


def test_a_stop_string_ends_text_ids_and_logprobs_together(llm: LLM) -> None:
    whole = run(llm, ["7 + 5 ="], GREEDY)[0].outputs[0]
    text = llm.tokenizer.token_text(whole.token_ids[5]).strip() or llm.tokenizer.token_text(
        whole.token_ids[5]
    )
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop=[text], logprobs=0)
    made = run(llm, ["7 + 5 ="], params)[0].outputs[0]
    assert (made.finish_reason, made.stop_reason) == ("stop", text)
    assert len(made.token_ids) <= 6
    assert made.token_ids == whole.token_ids[: len(made.token_ids)]
    assert made.logprobs is not None
    assert len(made.logprobs) == len(made.token_ids)
    assert text not in made.text
    assert text in llm.tokenizer.decode(made.token_ids)


def test_a_stop_token_is_counted_and_reported(llm: LLM) -> None:
    whole = run(llm, ["7 + 5 ="], GREEDY)[0].outputs[0]
    token = whole.token_ids[4]
    first = whole.token_ids.index(token)
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, stop_token_ids=[token])
    made = run(llm, ["7 + 5 ="], params)[0].outputs[0]
    assert (made.finish_reason, made.stop_reason) == ("stop", token)
    assert made.token_ids == whole.token_ids[: first + 1]
    assert made.text == llm.tokenizer.decode(made.token_ids[:-1])


def test_chat_takes_one_or_many_conversations(llm: LLM) -> None:
    one = [{"role": "user", "content": "hi"}]
    two = [{"role": "system", "content": "be brief"}, *one]
    single = llm.chat(one, GREEDY, use_tqdm=False)
    both = llm.chat([one, two], GREEDY, use_tqdm=False)
    assert single[0].outputs == both[0].outputs
    assert both[1].prompt is not None
    assert both[1].prompt.startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert both[0].prompt_token_ids[0] == llm.tokenizer.special["<|im_start|>"]
    own = llm.chat(
        one,
        GREEDY,
        use_tqdm=False,
        chat_template="Q: {{ messages[0].content }}{{ x }}",
        chat_template_kwargs={"x": "!"},
    )
    assert own[0].prompt == "Q: hi!"
    with pytest.raises(InvalidRequest, match=r"conversation 1: messages\[0\]\.role"):
        llm.chat([one, [{"content": "x"}]], GREEDY, use_tqdm=False)


def test_prefixes_are_found(settings: dict[str, Any]) -> None:
    prompt = {"prompt_token_ids": list(range(40, 80))}
    with LLM(**settings) as llm:
        assert run(llm, [prompt])[0].num_cached_tokens == 0
        again = run(llm, [prompt])[0]
    assert again.num_cached_tokens >= 32


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": 3}, "prompt 2: a prompt must be"),
        (17, "prompt 2: a prompt must be"),
        ({"prompt": "a", "more": 1}, "prompt 2: a prompt must be"),
        ({"prompt_token_ids": []}, "prompt 2: prompt_token_ids must not be empty"),
        ({"prompt_token_ids": [10**6]}, "prompt 2: prompt_token_ids must hold token ids from 0 to 1023"),
        ("", "prompt 2: prompt must not be empty"),
        ("\ud800", "prompt 2: the text holds a lone surrogate"),
    ],
)
def test_a_bad_prompt_is_named_before_anything_runs(llm: LLM, bad: Any, message: str) -> None:
    before = llm._core.stats().steps  # type: ignore[union-attr]
    with pytest.raises(InvalidRequest, match=message):
        run(llm, ["a", "b", bad, "c"])
    assert llm._core.stats().steps == before  # type: ignore[union-attr]
    assert len(run(llm, ["a"])) == 1


def test_too_long_prompts(llm: LLM) -> None:
    with pytest.raises(ContextLength, match="256"):
        run(llm, [{"prompt_token_ids": [40] * 256}])
    with pytest.raises(ContextLength, match="256"):
        run(llm, ["a"], SamplingParams(max_tokens=256))


def test_more_prompts_than_the_queue_holds(settings: dict[str, Any]) -> None:
    with LLM(**{**settings, "max_queued_requests": 3, "max_num_seqs": 2}) as llm:
        made = run(llm, [f"{number} pens" for number in range(12)])
        assert [output.prompt for output in made] == [f"{number} pens" for number in range(12)]
        assert all(output.finished for output in made)


def test_one_failed_sequence_leaves_the_others(llm: LLM) -> None:
    token = llm.tokenizer.encode("z")
    assert llm.tokenizer.encode("zz") == token * 2
    doomed = SamplingParams(max_tokens=5, allowed_token_ids=token, bad_words=["zz"], temperature=0)
    made = run(llm, ["a", "b", "c"], [GREEDY, doomed, GREEDY])
    assert [output.outputs[0].finish_reason for output in made] == ["length", "error", "length"]
    failed = made[1].outputs[0]
    assert failed.error is not None
    assert failed.token_ids == token
    assert len(made[2].outputs[0].token_ids) == 12


def test_a_dead_engine_says_so_for_good(settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(**settings) as llm:
        with monkeypatch.context() as patch:
            patch.setattr(EngineCore, "commit", _broken)
            with pytest.raises(EngineDead, match="RuntimeError"):
                llm.generate("a", GREEDY, use_tqdm=False)
        with pytest.raises(EngineDead, match="RuntimeError"):
            llm.generate("a", GREEDY, use_tqdm=False)


def _broken(core: EngineCore, *_: Any) -> None:
    raise RuntimeError("device lost")


class _Late:
    """A source that reports the awaited input of all sequences after a delay, or never."""

    sockets: tuple[Any, ...] = ()

    def __init__(self, after: float) -> None:
        self.at = time.monotonic() + after
        self.takes = 0

    def take(self, scheduler: Scheduler) -> list[TokenEvent]:
        self.takes += 1
        if time.monotonic() >= self.at:
            for sequence in list(scheduler._blocked_until):
                scheduler.arrived(sequence)
        return []

    def serve(self, scheduler: Scheduler) -> list[TokenEvent]:
        return []


@pytest.fixture
def blocked(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], _Late]:
    """Make every sequence wait for input that arrives after ``after`` seconds, for at most ``patience``
    seconds.
    """
    core = llm._core
    assert isinstance(core, EngineCore)
    add = core.scheduler.add

    def set_up(after: float, patience: float) -> _Late:
        source = _Late(after)
        monkeypatch.setattr(core, "sources", [source])
        late = lambda one, now: add(one, now, blocked=True, until=now + patience)  # noqa: E731
        monkeypatch.setattr(core.scheduler, "add", late)
        return source

    return set_up


def test_the_loop_sleeps_while_all_sequences_are_blocked(
    llm: LLM, blocked: Callable[[float, float], _Late]
) -> None:
    undisturbed = [output.outputs for output in run(llm, PROMPTS)]
    source = blocked(0.4, 30.0)
    assert [output.outputs for output in run(llm, PROMPTS)] == undisturbed
    assert source.takes < 60, "the loop sleeps while it waits"


def test_blocked_sequences_fail_at_their_deadline(llm: LLM, blocked: Callable[[float, float], _Late]) -> None:
    blocked(1e9, 0.3)
    began = time.monotonic()
    for output in run(llm, PROMPTS):
        assert output.outputs[0].finish_reason == "error"
    assert 0.3 <= time.monotonic() - began < deadline(10)


def test_an_interrupt_leaves_the_engine_usable(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, calls = EngineCore.step, []

    def interrupted(core: EngineCore) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return step(core)

    with monkeypatch.context() as patch:
        patch.setattr(EngineCore, "step", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(run(llm, ["a"])[0].outputs[0].token_ids) == 12


def test_an_interrupt_while_a_step_is_waited_for(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = Runner.read, []

    def interrupted(runner: Runner, handle: Any) -> Any:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return read(runner, handle)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "read", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert len(run(llm, ["a"])[0].outputs[0].token_ids) == 12


def test_after_shutdown(settings: dict[str, Any]) -> None:
    llm = LLM(**settings)
    llm.shutdown()
    llm.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        llm.generate("a", GREEDY)


def test_progress_goes_to_a_terminal(
    llm: LLM, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    llm.generate(["a", "b"], GREEDY)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    llm.generate(["a", "b"], GREEDY)
    shown = capsys.readouterr()
    assert shown.out == ""
    assert "2/2" in shown.err
    llm.generate(["a"], GREEDY, use_tqdm=False)
    assert capsys.readouterr().err == ""


def test_unknown_settings_are_answered_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM("spool-text", max_num_seq=3)


def test_importing_weft_imports_no_torch() -> None:
    code = "import sys, weft; weft.SamplingParams(); import weft.text.model, weft.text.choice; "
    code += "print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
    assert weft.__version__
    with pytest.raises(AttributeError):
        weft.nothing  # noqa: B018


def test_sampling_imports_no_part_of_a_compiler() -> None:
    """The import would add a third of a second to a server's first step."""
    command = [sys.executable, "-m", "tests.api.sampled_once"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_reset_empties_the_prefix_cache(llm: LLM) -> None:
    prompt = {"prompt_token_ids": list(range(40, 100))}
    llm.reset_prefix_cache()
    first = run(llm, prompt)
    assert llm.reset_prefix_cache() > 0
    assert llm.reset_prefix_cache() == 0
    before = llm.stats().prefix_hits
    again = run(llm, prompt)
    assert llm.stats().prefix_hits == before
    assert again[0].outputs[0].token_ids == first[0].outputs[0].token_ids


def test_prompts_of_other_libraries(llm: LLM) -> None:
    """Token ids may be a tensor, an array, or numbers of an array."""
    ids = llm.tokenizer.encode("pens")
    forms = [ids, torch.tensor(ids), np.array(ids), list(np.array(ids))]
    made = run(llm, [{"prompt_token_ids": form} for form in forms])
    assert [one.prompt_token_ids for one in made] == [ids] * 4
    with pytest.raises(InvalidRequest, match="no LoRA adapter 5"):
        llm.generate("a", GREEDY, use_tqdm=False, lora=5)  # type: ignore[arg-type]
    assert llm.generate("a", GREEDY, use_tqdm=False, priority=np.int64(1))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="documents must be a text or a list of texts"):
        llm.score("a", 5)  # type: ignore[arg-type]
    for source in (5, [5], [("x", 5)]):
        with pytest.raises(InvalidRequest, match="pairs of a name and a tensor"):
            llm.update_weights(source)  # type: ignore[arg-type]
