"""Contradictory settings of expert parallelism are refused with the name of the setting."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.specs import model_spec
from weft.common.errors import ConfigError
from weft.config.expert_settings import check_experts
from weft.config.sections.all import ParallelSection
from weft.config.spec import MoESpec

MOE = MoESpec(experts=4, top_k=2, intermediate=8, renormalize=True, layers=(0,))


def _check(moe: MoESpec | None = MOE, **settings: Any) -> None:
    check_experts(model_spec(moe=moe), ParallelSection(**settings))


def test_what_goes_together() -> None:
    _check()
    _check(None, tensor_parallel_size=2)
    both: dict[str, Any] = {"enable_expert_parallel": True, "tensor_parallel_size": 2}
    _check(**both, moe_dispatch="reduce")
    _check(**both, data_parallel_size=2, moe_dispatch="gather", redundant_experts=12, eplb_interval=1000)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"moe_dispatch": "gather"}, "--moe-dispatch gather .* --enable-expert-parallel"),
        ({"redundant_experts": 1}, "--redundant-experts 1 .* --enable-expert-parallel"),
        ({"eplb_interval": 9}, "--eplb-interval 9 .* --enable-expert-parallel"),
        (
            {"enable_expert_parallel": True, "data_parallel_size": 2, "moe_dispatch": "reduce"},
            "--moe-dispatch reduce .* --data-parallel-size 2",
        ),
        (
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "redundant_experts": 5},
            "--redundant-experts 5: 2 ranks can hold at most 4 additional copies of 4 experts",
        ),
    ],
)
def test_what_does_not(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        _check(**settings)


def test_a_model_without_experts() -> None:
    with pytest.raises(ConfigError, match="LlamaForCausalLM has no routed experts"):
        _check(None, enable_expert_parallel=True, tensor_parallel_size=2)
