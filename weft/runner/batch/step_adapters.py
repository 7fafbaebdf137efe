"""Places of LoRA adapters, and the agreement of replicas, in the input of a step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from weft.attention.base import StepInput
from weft.ops.low_rank import AdapterRows
from weft.runner.slot_state import SlotState
from weft.types.exchange import Exchange
from weft.types.plan import StepPlan

Tensor = torch.Tensor


def agreed(plan: StepPlan, step: StepInput) -> StepInput:
    """Return the step with the exchange that the replicas agreed on, or ``step`` without an agreement."""
    agreement = plan.agreed
    if agreement is None:
        return step
    exchange = Exchange(rows=agreement.padded_tokens, adapted=agreement.adapted)
    return replace(step, exchange=exchange)


def with_adapters(step: StepInput, state: SlotState, token_slots: Tensor, *slots: np.ndarray) -> StepInput:
    """Return the step with the places of the adapters of all tokens, or ``step`` if no row has an adapter.

    token_slots: int64 [T], or [T / n] if each slot has n tokens. ``slots``: slots of the rows, on the host.
    """
    present = state.adapters(*slots)
    if not present:
        return step
    places = state.places[token_slots]
    if len(places) < len(step.ids):
        places = places.repeat_interleave(len(step.ids) // len(places))
    return replace(step, adapters=AdapterRows(places, present))
