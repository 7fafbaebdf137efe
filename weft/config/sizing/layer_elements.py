"""Parameters of recurrent mixers and of feed-forward blocks, for the memory plan."""

from __future__ import annotations

from weft.config.spec import ModelSpec
from weft.types.layout import Layout


def recurrent_layers(spec: ModelSpec) -> int:
    """Return the number of layers with a recurrent mixer in place of attention, not beside attention."""
    mixers = (spec.delta, spec.conv, spec.mamba, spec.mamba1)
    return sum(layer < spec.layers for mixer in mixers if mixer is not None for layer in mixer.layers)


def recurrent_elements(spec: ModelSpec) -> int:
    """Return the parameters of all recurrent mixers, without norms and biases."""
    total = 0
    if (delta := spec.delta) is not None:
        key = delta.k_heads * delta.k_dim
        value = delta.v_heads * delta.v_dim
        one = spec.hidden * (2 * key + 2 * value + delta.v_heads) + delta.conv * (2 * key + value)
        if rank := delta.gate_rank:
            one += rank * (2 * spec.hidden + delta.decays + value)
        else:
            one += spec.hidden * (delta.decays + value)
        total += len(delta.layers) * one
    if (conv := spec.conv) is not None:
        channels = conv.heads * conv.dim
        total += len(conv.layers) * channels * (4 * spec.hidden + conv.taps)
    if (mamba := spec.mamba) is not None:
        inner = mamba.heads * mamba.dim
        shared = 2 * mamba.groups * mamba.state
        one = spec.hidden * (3 * inner + shared + mamba.heads) + mamba.conv * (inner + shared)
        total += len(mamba.layers) * one
    if (first := spec.mamba1) is not None:
        one = 3 * spec.hidden + first.selected + first.rank + first.conv + first.state
        total += len(first.layers) * first.inner * one
    return total


def recurrent_row(spec: ModelSpec) -> int:
    """Return the elements of a token's inputs and output of a recurrent mixer, in the model's dtype.

    0 without mixers. See ``mixer_elements`` for the intermediate results.
    """
    rows = [0]
    if (delta := spec.delta) is not None:
        key, value = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim
        rows.append(2 * key + 3 * value + delta.decays + delta.v_heads + 2 * delta.gate_rank)
    if spec.conv is not None:
        rows.append(4 * spec.conv.heads * spec.conv.dim)
    if spec.mamba is not None:
        mamba = spec.mamba
        # The output may be wide. Factors of the inputs give a second copy of the inputs.
        copies = 2 if any(factor != 1 for factor in mamba.factors) else 1
        inner = mamba.heads * mamba.dim
        rows.append(copies * (2 * (inner + mamba.groups * mamba.state) + mamba.heads) + 2 * inner)
    if (first := spec.mamba1) is not None:
        # Channels and gate, convolved channels, time steps and output; then the selected elements and copies.
        rows.append(5 * first.inner + 3 * first.selected)
    return max(rows)


def mixer_elements(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Return the elements of all intermediate results of a recurrent mixer, computed by torch; 0 without one.

    Elements are float32, or wider in a wider model. ``tokens``, ``rows``: the largest step. The number is an
    upper bound: tests/attention/test_mixer_plans.py compares it with torch's memory profiler.
    """
    found = (
        delta_elements(spec, tokens, rows),
        mamba_elements(spec, tokens, rows),
        conv_elements(spec, tokens),
        mamba1_elements(spec, tokens, rows),
    )
    return max(found)


def conv_elements(spec: ModelSpec, tokens: int) -> int:
    """Return the part of ``mixer_elements`` of short convolutions."""
    if spec.conv is None:
        return 0
    # The inputs twice, the products, the products with the inputs before, two sums, and a copy of the output.
    return tokens * 11 * spec.conv.heads * spec.conv.dim


def mamba_elements(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Return the part of ``mixer_elements`` of Mamba2."""
    mamba = spec.mamba
    if mamba is None:
        return 0
    heads, inner, shared = mamba.heads, mamba.heads * mamba.dim, mamba.groups * mamba.state
    channels, repeated = inner + 2 * shared, heads * mamba.state
    # The inputs as float32, beside a copy in the order of the rows.
    inputs = 3 * (inner + channels + heads) // 2
    # The convolution: past and new inputs, two sums, and three factors of the activation.
    convolved = inputs + 6 * channels
    # The recurrence: inputs with their past, x, B and C behind the convolution, x times the time step, and
    # the outputs of all parts twice.
    kept = inputs + 2 * channels + 3 * inner + 4 * heads
    # The output: y, the sum with x, and the factors of gate and norm.
    finished = kept + 5 * inner
    # Chunks, of at most 2048 tokens at a time (``SPAN``): padded copies, products [64, 64] of tokens, and B
    # and C with their decays for each head.
    chunked = 4 * inner + 4 * shared + 64 * (3 * heads + mamba.groups) + 3 * repeated
    part = min(tokens + 63, 2048)
    total = max(tokens * max(convolved, finished), tokens * kept + part * chunked)
    # Each row has its state, and rows of one part have further copies (``ROWS``).
    states = (rows + 4 * min(rows, 32)) * inner * mamba.state
    return total + states


def mamba1_elements(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Return the part of ``mixer_elements`` of Mamba 1."""
    mamba = spec.mamba1
    if mamba is None:
        return 0
    one = mamba.inner * mamba.state
    # The convolution: as short convolutions. The recurrence: channels, time steps, gate and outputs as
    # float32, factors of softplus and of the gate.
    computed = tokens * 11 * mamba.inner
    # States of the tokens of one part (``MOST_STATES``), with decays and products.
    part = min(tokens * one, max(one, 1 << 21))
    return computed + 4 * part + 2 * rows * one


def delta_elements(spec: ModelSpec, tokens: int, rows: int) -> int:
    """Return the part of ``mixer_elements`` of a gated delta net."""
    delta = spec.delta
    if delta is None:
        return 0
    key, value, heads = delta.k_heads * delta.k_dim, delta.v_heads * delta.v_dim, delta.v_heads
    channels, repeated = 2 * key + value, heads * delta.k_dim
    # The inputs as float32: q, k, v, z, the decays and b.
    inputs = channels + value + delta.decays + heads
    # The convolution: past and new inputs, two sums, and three factors of the activation.
    convolved = inputs + 6 * channels
    # The recurrence: q, k and v behind the convolution, q and k with length 1 and repeated, and the decays.
    kept = inputs + channels + 2 * key + 2 * repeated + 2 * delta.decays + heads
    # Chunks: padded copies, products [64, 64] of keys and queries, and both sides of a triangular system with
    # copies for the solver.
    chunked = 7 * repeated + 4 * value + 3 * delta.decays + 5 * 64 * heads
    if delta.by_channel:
        # 256 tokens at a time (``MOST_BY_CHANNEL``). The outputs of all parts exist twice.
        total = tokens * max(convolved, kept + 2 * value) + 256 * chunked
    else:
        # One row alone may be padded to a whole chunk.
        total = tokens * max(convolved, kept + chunked) + 63 * chunked
    # Each row has a few copies of the state at a time.
    states = 4 * rows * repeated * delta.v_dim
    return total + states + recurrent_pass(spec)


def recurrent_pass(spec: ModelSpec) -> int:
    """Return the elements of intermediate results with a decay for every key channel, else 0.

    The number does not depend on the tokens of the step: torch computes at most 4 chunks together
    (``MOST_BY_CHANNEL``). Three tensors [4, heads, 16, 16, channels], float32 or wider, exist at a time.
    """
    if spec.delta is None or not spec.delta.by_channel:
        return 0
    return 3 * 4 * 16 * 16 * spec.delta.decays


def dense_elements(spec: ModelSpec) -> int:
    """Return the parameters of one dense feed-forward block."""
    return (3 if spec.gated else 2) * spec.hidden * spec.intermediate


def latent_elements(spec: ModelSpec) -> int:
    """Return the parameters of all projections before and behind latent experts."""
    moe = spec.moe
    return 0 if moe is None else 2 * len(moe.layers) * spec.hidden * moe.latent


def grouped_elements(spec: ModelSpec) -> int:
    """Return the mean number of parameters of a layer with grouped queries."""
    # Query and output projections, plus the output gate; then keys and values.
    queries = spec.heads * (3 if spec.output_gate else 2)
    if not spec.attention.shared_kv and not spec.attention.key_is_value:
        heads = [cache for cache in spec.caches if cache.kv_heads]
        if len({(cache.kv_heads, cache.head_dim) for cache in heads}) < 2:
            return spec.hidden * spec.head_dim * (queries + 2 * spec.kv_heads)
    total = 0
    for layer in range(spec.layers):
        source = spec.attention.source(layer)
        cache = spec.caches[spec.cache_of(source)]
        parts = 0 if source != layer else 1 if layer in spec.attention.key_is_value else 2
        total += spec.hidden * cache.head_dim * (queries + parts * cache.kv_heads)
    return total // spec.layers


def counted_elements(spec: ModelSpec, layout: Layout, redundant: int) -> tuple[int, int]:
    """Return the counted parameters of one rank, without and of whole experts of this rank.

    spec: the spec of one rank. ``redundant``: extra copies of experts over all ranks.
    """
    experts = spec.counted_experts
    if experts is None or not layout.expert:
        return spec.counted, 0
    mine = -(-(experts.experts + redundant) // layout.ranks)
    # ``spec.counted`` has the experts as tensor parallel ranks divide them; here ranks have whole experts.
    divided = experts.whole + (experts.elements - experts.whole) // layout.tensor
    return spec.counted - divided, experts.elements // experts.experts * mine


def layer_elements(spec: ModelSpec) -> int:
    """Return the parameters of all layers' inputs and doubled feed-forwards, without tables."""
    double = len(spec.layer.double) * (3 if spec.gated else 2) * spec.hidden * spec.intermediate
    return double + 3 * spec.layers * spec.layer.inputs * spec.hidden


def input_table_elements(spec: ModelSpec, ranks: int) -> int:
    """Return the parameters of a rank's part of the table of layer inputs; 0 without layer inputs."""
    return -(-spec.layer.inputs_vocab // ranks) * spec.layers * spec.layer.inputs
