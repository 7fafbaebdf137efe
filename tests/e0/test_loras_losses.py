"""LoRA adapters after a loss of ranks, and after new weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.e0.rig import CPU, make_engine, run, spec_of, submit
from tests.e0.test_loras import GREEDY, PROMPTS, load, tokens
from tests.support.checkpoints import make_checkpoint
from tests.support.loras import make_adapter, merge
from tests.support.ranks import on_ranks
from tests.support.slowness import deadline
from weft.config.adapters import read_adapter
from weft.config.sections.lora_section import LoraSection
from weft.engine.weights.open_weights import open_weights
from weft.layers.build import AdapterOptions
from weft.models.loader import load_model
from weft.parallel.mesh import Mesh
from weft.types.layout import Layout
from weft.types.plan import HoldAdapter, PlaceAdapter, ReleaseAdapter, ReplicaUpdate
from weft.types.weights import WeightsUpdate

LORA = LoraSection(max_loras=1)


def model_of(base: Path, mesh: Mesh | None = None):  # type: ignore[no-untyped-def]
    options = AdapterOptions(places=1, rank=4)
    return load_model(
        str(base), spec_of(base), torch.float64, CPU, progress=False, adapters=options, mesh=mesh
    )


def test_a_new_rank_beside_a_rank_that_was_not_lost(tmp_path: Path) -> None:
    """Factors of DoRA are sums over ranks: both ranks read the adapter again, and the sums pair."""
    base = make_checkpoint(tmp_path, "llama")
    folder = make_adapter(tmp_path / "one", base, use_dora=True)
    digest = read_adapter(folder).digest
    updates = [HoldAdapter(digest=digest, folder=str(folder)), PlaceAdapter(digest=digest, place=0)]

    def work(mesh: Mesh) -> list[torch.Tensor]:
        made = []
        model = model_of(base, mesh)
        engine, runner = make_engine(base, model=model, lora=LORA)
        for lost in (False, True):
            if lost and mesh.rank:
                model = model_of(base, mesh)
            elif lost:
                runner.reset()
            model.adapters.apply(updates)
            made.append(torch.cat([low.pool.factors[0] for low in model.adapters._layers]))
        engine.close()
        return made

    for before, after in on_ranks(Layout(tensor=2), work, deadline(5.0)):
        torch.testing.assert_close(before, after)


def test_host_memory_after_a_loss_of_ranks(tmp_path: Path) -> None:
    """An adapter stays while any replica needs the adapter, and after a loss only if a replica sends the
    adapter again."""
    base = make_checkpoint(tmp_path, "llama")
    folders = [make_adapter(tmp_path / f"a{seed}", base, seed=seed) for seed in range(2)]
    first, second = (
        HoldAdapter(digest=read_adapter(folder).digest, folder=str(folder)) for folder in folders
    )
    model = model_of(base)
    engine, runner = make_engine(base, model=model, lora=LORA)
    held = model.adapters._held
    model.adapters.apply([first, *(ReplicaUpdate(replica=1, update=one) for one in (first, second))])
    model.adapters.apply([ReleaseAdapter(digest=first.digest)])
    assert set(held) == {first.digest, second.digest}
    runner.reset()
    model.adapters.apply([first])
    assert set(held) == {first.digest}
    model.adapters.apply([ReleaseAdapter(digest=first.digest)])
    assert not held
    engine.close()


def test_new_weights_change_the_factors(tmp_path: Path) -> None:
    """The lengths of the rows of a DoRA adapter follow the weights in use."""
    base, other = (make_checkpoint(tmp_path / str(seed), "llama", seed) for seed in range(2))
    folder = make_adapter(tmp_path / "one", base, use_dora=True)
    digest = read_adapter(folder).digest
    model = model_of(base)
    engine, _ = make_engine(base, model=model, lora=LORA, caching=False)
    load(engine, folder, digest)

    def answers() -> list[list[int]]:
        asked = [
            submit(number, one, GREEDY, request=number, adapter=digest) for number, one in enumerate(PROMPTS)
        ]
        made = run(engine, [asked])
        return [made[number].tokens for number in range(len(PROMPTS))]

    assert answers() == tokens(merge(tmp_path / "old", base, folder))
    weights = open_weights(model, 0, lambda **_: model_of(other))
    weights.stage(WeightsUpdate(version=1, files=tuple(map(str, other.glob("*.safetensors")))))
    assert weights.wait().error is None
    weights.swap(1)
    assert answers() == tokens(merge(tmp_path / "new", other, folder))
    engine.close()
    weights.close()
