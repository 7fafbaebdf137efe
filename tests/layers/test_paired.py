"""Two linear layers over the same inputs: one product, where the formats of the matrices permit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from weft.layers.build import AdapterOptions, Build
from weft.layers.paired import PairedLinear
from weft.layers.pending_codes import put_codes
from weft.models.refill import weights_of
from weft.ops import coded, torch_ops
from weft.ops.coded import Codes

Tensor = torch.Tensor

INPUTS, FIRST, SECOND = 64, 12, 5
FORMATS: dict[str, Callable[[Tensor], Codes] | None] = {
    "plain": None,
    "int8": torch_ops.to_int8_codes,
    "int4": coded.to_int4,
}


def made(
    formats: tuple[str, str], *, bias: bool = False, options: AdapterOptions = AdapterOptions()
) -> tuple[PairedLinear, ...]:
    """Return two layers with weights in ``formats``, not packed."""
    torch.manual_seed(0)
    build = Build(dtype=torch.float64, device=torch.device("cpu"), adapters=options)
    layers = []
    for outputs, name in zip((FIRST, SECOND), formats, strict=True):
        layer = PairedLinear(INPUTS, outputs, build, bias=bias and not layers)
        assert layer.weight is not None
        layer.weight.data.normal_()
        to_codes = FORMATS[name]
        if to_codes is not None:
            put_codes(build.notes.weight(layer.weight), 0, 0, to_codes(layer.weight.data))
        if layer.bias is not None:
            layer.bias.data.normal_()
        layers.append(layer)
    return tuple(layers)


def nbytes(*layers: PairedLinear) -> int:
    """Return the bytes of all weights that the layers hold, without the biases."""
    held = weights_of(nn.ModuleList(layers))
    return sum(tensor.nbytes for place, tensor in held.items() if not place.endswith(".bias"))


@pytest.mark.parametrize(
    ("formats", "joined"),
    [
        (("plain", "plain"), True),
        (("int8", "int8"), True),
        (("int4", "int4"), True),
        (("int8", "int4"), False),
        (("int8", "plain"), False),
        (("plain", "int4"), False),
    ],
    ids=str,
)
@pytest.mark.parametrize("bias", [False, True])
def test_a_pair_has_the_results_of_two_layers(formats: tuple[str, str], joined: bool, bias: bool) -> None:
    first, second = made(formats, bias=bias)
    first.pack_with(second)
    for layer in (first, second):
        layer.pack()  # the model packs every layer after the layer that contains the layer
    assert first.joined == joined
    alone = made(formats, bias=bias)
    for layer in alone:
        layer.pack()
    assert nbytes(first, second) == nbytes(*alone), "weights are in memory twice"
    x = torch.randn(7, INPUTS, dtype=torch.float64)
    results = first.both(second, x, None)
    for layer, result in zip(alone, results, strict=True):
        assert torch.allclose(result, layer(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [AdapterOptions(places=1, rank=2), AdapterOptions(like_places=True)])
def test_places_for_adapters_keep_two_products(options: AdapterOptions) -> None:
    """Also in the model that reads new weights for a model with places."""
    first, second = made(("plain", "plain"), options=options)
    first.pack_with(second)
    assert not first.joined
    x = torch.randn(3, INPUTS, dtype=torch.float64)
    assert torch.equal(first.both(second, x, None)[1], second(x))
