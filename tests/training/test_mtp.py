"""The trained MTP layer equals the published layer, and drafts count as in serving."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.utils import logging

from training.mtp import DeepseekV3WithMtp, chain_mask, draft_hits
from training.spool_mla import DRAFTS, TOKENIZER, SpoolMla, acceptance

DOUBLE: dict[str, Any] = {"dtype": torch.float64, "experts_implementation": "eager"}


def published(folder: Path) -> tuple[Any, Any]:
    """``transformers``' own main model and MTP model of a folder, in float64."""
    logging.set_verbosity_error()  # that the main model does not take the MTP layer is known
    main = AutoModelForCausalLM.from_pretrained(folder, **DOUBLE).eval()
    layer = main.config.num_hidden_layers
    main._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{layer}\..*"]  # the class has 61 built in
    return main, MtpModel.from_pretrained(main).eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a random model with visible norms and correction biases, exported by the script."""
    script, folder = SpoolMla(), tmp_path_factory.mktemp("spool-mla")
    torch.manual_seed(5)
    tokenizer = script.tokenizer(folder)
    model = script.new_model(tokenizer)
    with torch.no_grad():
        for name, p in itertools.chain(model.named_parameters(), model.named_buffers()):
            if "norm" in name or "correction" in name:
                p += 0.3 * torch.randn_like(p)
            elif p.ndim > 1:
                p *= 5  # attention and routing that are far from uniform
    script.export(model, tokenizer, folder)
    return folder


@torch.no_grad()
def test_hidden_states_of_chained_drafts_are_transformers(folder: Path) -> None:
    """Exported, loaded by the published classes and drafted from a cache, step by step."""
    main, mtp = published(folder)
    ours = DeepseekV3WithMtp.from_pretrained(folder, **DOUBLE).eval()
    ids = torch.randint(0, 1024, (1, 17), generator=torch.Generator().manual_seed(7))
    hidden = main(input_ids=ids, output_hidden_states=True).hidden_states[-1]
    torch.testing.assert_close(ours.model(input_ids=ids).last_hidden_state, hidden, rtol=1e-12, atol=1e-12)
    outs = ours.chain(ids, hidden, DRAFTS)
    assert [out.shape[1] for out in outs] == [16, 15, 14]
    for start in (0, 4, 11):
        cache = MtpCache(config=main.config.get_mtp_config())
        positions, known = torch.arange(1, start + 2)[None], ids[:, 1 : start + 2]
        x = mtp.forward_layer(0, hidden[:, : start + 1], positions, cache, input_ids=known)[:, -1:]
        for s, out in enumerate(outs):
            if s:
                at = start + 1 + s
                x = mtp.forward_layer(0, x, torch.tensor([[at]]), cache, input_ids=ids[:, at : at + 1])
            # transformers computes softmax and norms in float32 whatever the model's dtype
            torch.testing.assert_close(out[:, start : start + 1], x, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_acceptance_is_what_stepwise_decoding_counts(folder: Path) -> None:
    """Draft, verify, keep the longest right prefix: counted one step at a time with the published classes."""
    main, mtp = published(folder)
    ours = DeepseekV3WithMtp.from_pretrained(folder, **DOUBLE).eval()
    prompt = list(range(5, 15))
    reply = _greedy(main, prompt, 12)
    # A random model never drafts right, so the reply is mixed with what its drafts are.
    for at in (3, 4, 5, 8):
        reply[at] = _drafts(main, mtp, prompt + reply[:at], 1)[0]
    hits = draft_hits(ours, prompt, reply, DRAFTS)
    assert hits.shape == (DRAFTS, 11)
    steps, accepted, known = 0, [0] * DRAFTS, 1
    while known < len(reply):
        drafts = _drafts(main, mtp, prompt + reply[:known], DRAFTS)
        pairs = zip(drafts, reply[known : known + DRAFTS], strict=False)
        run = len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        assert int(hits[:, known - 1].cumprod(0).sum()) == run
        for s in range(run):
            accepted[s] += 1
        steps, known = steps + 1, known + 1 + run
    rates = acceptance(ours, [prompt], [reply])
    assert accepted[0] >= 2
    assert [rates[f"accepted_{s + 1}_of_{DRAFTS}"] for s in range(DRAFTS)] == [
        round(count / steps, 4) for count in accepted
    ]


def _greedy(main: Any, ids: list[int], count: int) -> list[int]:
    known = list(ids)
    for _ in range(count):
        known.append(int(main(input_ids=torch.tensor([known])).logits[0, -1].argmax()))
    return known[len(ids) :]


def _drafts(main: Any, mtp: Any, known: list[int], count: int) -> list[int]:
    """Return the drafts after ``known``. The main model has not seen the last token."""
    x = main(input_ids=torch.tensor([known[:-1]]), output_hidden_states=True).hidden_states[-1]
    cache, drafts, ids, at = MtpCache(config=main.config.get_mtp_config()), [], known[1:], 1
    for _ in range(count):
        positions = torch.arange(at, at + len(ids))[None]
        x = mtp.forward_layer(0, x, positions, cache, input_ids=torch.tensor([ids]))[:, -1:]
        at += len(ids)
        ids = [int(main.lm_head(x)[0, 0].argmax())]
        drafts += ids
    return drafts


def test_a_chained_step_sees_verified_entries_and_its_own_chain() -> None:
    seen = chain_mask(4, 2)[0, 0] == 0
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 1, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1, 0, 0, 1],
    ]


def test_the_tokenizer_is_the_other_models() -> None:
    tokenizer = SpoolMla().tokenizer(Path("unused"))
    assert (TOKENIZER / "tokenizer.json").is_file()
    assert len(tokenizer) == 1024
