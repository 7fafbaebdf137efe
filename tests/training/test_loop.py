"""The training loop: schedule, resuming, balance of the experts, and the optimizer for matrices."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from training import loop
from training.loop import Recipe, Run, rate_at
from training.muon import Muon, orthogonal
from training.spool_mla import MlaRecipe, SpoolMla, routers
from training.spool_text import SpoolText

pytestmark = pytest.mark.slow


def some_rows(seed: int) -> tuple[Tensor, Tensor]:
    """Return ids [3, 20] and weights. Questions end at position 5, and the last row has padding."""
    ids = torch.randint(3, 1000, (3, 20), generator=torch.Generator().manual_seed(seed))
    weights = torch.ones(3, 20)
    weights[:, :5] = 0.1
    weights[2, 15:] = 0.0
    return ids, weights


def test_the_rate_warms_up_and_falls_to_its_end() -> None:
    recipe = Recipe(warmup=10, lr=1e-2, lr_end=1e-3)
    assert [rate_at(recipe, step, 0.0) for step in (0, 4, 9)] == [0.1, 0.5, 1.0]
    assert rate_at(recipe, 10, 0.0) == 1.0
    assert rate_at(recipe, 10, 0.5) == pytest.approx(0.55)
    assert rate_at(recipe, 10, 1.0) == pytest.approx(0.1)


def test_a_resumed_run_goes_on_as_if_it_had_not_stopped(tmp_path: Path) -> None:
    recipe = MlaRecipe(minutes=0, steps=3, warmup=1, chain_from=0.0)
    script = SpoolMla()
    whole = Run(tmp_path, script, recipe)
    first, second, third = (some_rows(seed) for seed in range(3))
    whole.update(*first)
    before = {name: p.detach().clone() for name, p in whole.model.named_parameters()}
    whole.save()
    resumed = Run(tmp_path, script, recipe)
    for run in (whole, resumed):
        assert set(run.update(*second)) == {"answer_loss", "draft_1_loss", "draft_2_loss", "draft_3_loss"}
        run.update(*third)
        assert run.done()
        assert run.step == 3
    for (name, a), b in zip(
        whole.model.state_dict().items(), resumed.model.state_dict().values(), strict=True
    ):
        assert torch.equal(a, b), name
    unmoved = [name for name, p in whole.model.named_parameters() if torch.equal(p, before[name])]
    assert unmoved == []


def test_time_in_which_a_worker_was_stopped_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = MlaRecipe(minutes=1.0)
    run = Run(tmp_path, SpoolMla(), recipe)
    run.last -= 1000
    run.update(*some_rows(0))
    assert run.seconds == loop.STOPPED
    assert run.progress() == pytest.approx(loop.STOPPED / 60)
    run.seconds = 60.0
    assert run.done()


def test_correction_biases_move_toward_balance() -> None:
    script = SpoolMla()
    model = script.new_model(script.tokenizer(Path("unused")))
    assert len(routers(model)) == 4
    for router in routers(model):
        router.load.copy_(torch.tensor([9.0, 1, 1, 1, 1, 1, 1, 1]))
    script.after_step(model, MlaRecipe(balance=0.5))
    for router in routers(model):
        assert router.e_score_correction_bias.tolist() == [-0.5] + [0.5] * 7
        assert router.load.sum() == 0


def test_a_step_counts_every_choice_of_every_router() -> None:
    script, recipe = SpoolMla(), MlaRecipe(mtp_rows=1)
    model = script.new_model(script.tokenizer(Path("unused")))
    script.loss(model, (torch.randint(3, 1000, (2, 10)), torch.ones(2, 10)), recipe, 0.0)
    assert [int(router.load.sum()) for router in routers(model)] == [40, 40, 40, 36]


def test_loss_of_the_other_script() -> None:
    """The loss covers only the next token: without padding and at weight one, the cross entropy."""
    script = SpoolText()
    tokenizer = SpoolMla().tokenizer(Path("unused"))
    torch.manual_seed(0)
    model = script.new_model(tokenizer)
    ids = torch.randint(3, 1000, (2, 10))
    total, means = script.loss(model, (ids, torch.ones(2, 10)), script.recipe(router_aux=0.0), 0.0)
    logits = model(input_ids=ids).logits[:, :-1]
    wanted = torch.nn.functional.cross_entropy(logits.reshape(-1, len(tokenizer)), ids[:, 1:].reshape(-1))
    torch.testing.assert_close(total, wanted)
    torch.testing.assert_close(means["answer_loss"], wanted.detach())


@pytest.mark.parametrize("shape", [(3, 16, 48), (2, 48, 16), (1, 20, 20)])
def test_updates_are_nearly_orthogonal(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(1)
    raw = torch.randn(shape) * torch.logspace(-0.5, 0.5, shape[-1])
    sizes = torch.linalg.svdvals(orthogonal(raw))
    assert sizes.min() > 0.3
    assert sizes.max() < 1.4


def test_halves_are_made_orthogonal_by_themselves() -> None:
    torch.manual_seed(2)
    grad = torch.cat((torch.randn(8, 12), 1000 * torch.randn(8, 12)))[None]
    updates = []
    for halves in (False, True):
        p = torch.nn.Parameter(torch.zeros(1, 16, 12))
        p.grad = grad.clone()
        Muon([{"params": [p], "halves": halves}], lr=1.0, weight_decay=0.0).step()
        updates.append(p.detach()[0])
    norms = [[float(half.norm()) for half in update.split(8)] for update in updates]
    assert norms[1][0] == pytest.approx(norms[1][1], rel=0.3)
    assert norms[0][0] < 0.8 * norms[0][1]
