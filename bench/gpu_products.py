"""Time the matrix products of one layer of llama-3-8b on a GPU, in bfloat16 and packed, with peers.

python -m bench.gpu_products --json products.json
python -m bench.gpu_products --packed --seconds 100 --json packed.json  # in two minutes: both kernels
python -m bench.gpu_products --forms int4 --rows 1 16 64 256            # tiles of the kernel for words

Packed columns are what a model uses: on Hopper the kernel for words (``weft.ops.triton.words``). Columns with
"rows" use the kernel for codes row by row.

A time is the median over replays of a CUDA graph. The graph runs over copies of the weights that hold
``ROTATED`` weights together, more than the GPU's L2 cache holds. A model also reads each matrix from
memory. Peers that are not installed, or that fail, are listed with the reason.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from bench import record
from bench.gemm import codes_of

Call = Callable[[torch.Tensor], object]
"""A product of x, bfloat16 [rows, K]."""
Table = dict[str, dict[str, float]]
"""Column -> number of rows -> microseconds."""

LAYER = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
"""(outputs, inputs) of a layer's products."""
PACKED = ("int8", "int4", "fp8", "mxfp4", "nvfp4")
ROWS = (1, 16, 64, 128, 256, 512, 4096)
QUICK_ROWS = (1, 16, 64, 256, 4096)
"""Rows of --packed."""
ROTATED = 300_000_000
"""Weights in the copies of one matrix: 150 MB of 4-bit codes."""
FP8 = torch.float8_e4m3fn
FP8_MAX = 448.0


def dense(matrix: torch.Tensor) -> Callable[[], Call]:
    """Products by torch (cuBLAS)."""

    def make_copy() -> Call:
        weight = matrix.clone()
        return lambda x: torch.nn.functional.linear(x, weight)

    return make_copy


def invariant(matrix: torch.Tensor) -> Callable[[], Call]:
    """Products of the deterministic mode: bits of a row do not depend on other rows."""
    from weft.ops.triton import matmul

    def make_copy() -> Call:
        return partial(_swapped, matmul.linear, matrix.clone())

    return make_copy


def _swapped(linear: Any, weight: Any, x: torch.Tensor) -> object:
    return linear(x, weight)


def packed(name: str, matrix: torch.Tensor, rows: bool = False) -> Callable[[], Call]:
    """Weft's products of a packed matrix; with ``rows`` by the kernel for codes row by row."""
    from weft.ops.registry import choose
    from weft.ops.triton import coded

    op = choose("linear", torch.bfloat16, torch.device("cuda"))
    linear, pack = (coded.linear, coded.pack) if rows else (op.run, op.pack_codes)
    assert pack is not None
    weight = pack(codes_on_gpu(matrix, name))

    def make_copy() -> Call:
        return partial(_swapped, linear, cloned(weight))

    return make_copy


def cloned(weight: Any) -> Any:
    """Return a copy of the packed matrix."""
    tensors = {
        field.name: getattr(weight, field.name).clone()
        for field in fields(weight)
        if isinstance(getattr(weight, field.name), torch.Tensor)
    }
    return replace(weight, **tensors)


def codes_on_gpu(matrix: torch.Tensor, name: str) -> Any:
    """Return ``matrix`` as codes of a checkpoint."""
    from weft.ops.torch_ops import to_int8_codes

    if name == "int8":
        return to_int8_codes(matrix)
    codes = codes_of(matrix.cpu() if name in ("mxfp4", "nvfp4") else matrix, name)
    return codes.to(torch.device("cuda"))


def scaled_mm(rounded: bool, matrix: torch.Tensor) -> Callable[[], Call]:
    """torch's FP8 products with a scale per row; with ``rounded`` the time includes rounding x to FP8."""
    scale = matrix.abs().amax(1, keepdim=True).float() / FP8_MAX
    codes = (matrix / scale).to(FP8)
    scales = scale.t().contiguous()

    def make_copy() -> Call:
        weight = codes.clone().t()
        ones = torch.ones(max(ROWS), 1, device=matrix.device)

        def call(x: torch.Tensor) -> object:
            if rounded:
                given = x.abs().amax(1, keepdim=True).float() / FP8_MAX
                numbers = (x / given).to(FP8)
            else:
                # Any bytes of the right size: only the time counts.
                given, numbers = ones[: len(x)], x.view(torch.uint8)[:, : x.shape[1]].view(FP8)
            return torch._scaled_mm(
                numbers, weight, scale_a=given, scale_b=scales, out_dtype=torch.bfloat16, use_fast_accum=True
            )

        return call

    return make_copy


def fp8_by_name(matrix: torch.Tensor) -> Callable[[], Call]:
    """Weft's products of ``--quantization w8a8-fp8``, with the kernel that rounds x."""
    from weft.ops.triton import scaled

    weight = scaled.pack(matrix)

    def make_copy() -> Call:
        return partial(_swapped, scaled.linear, cloned(weight))

    return make_copy


def humming(dtype: str, group: int, matrix: torch.Tensor) -> Callable[[], Call]:
    """Products of the package humming-kernels."""
    from humming.layer import HummingLayer

    n, k = matrix.shape
    config = {"dtype": dtype, "group_size": group}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
    layer.load_from_unquantized(matrix)
    layer.transform()
    return partial(copy.deepcopy, layer)


def deep_gemm(matrix: torch.Tensor) -> Callable[[], Call]:
    """DeepGEMM's FP8 products with scales of 128 x 128 weights; x is given in FP8."""
    import deep_gemm as package

    n, k = matrix.shape
    blocks = matrix.view(n // 128, 128, k // 128, 128)
    scale = blocks.abs().amax((1, 3)).float() / FP8_MAX
    codes = (blocks / scale[:, None, :, None]).to(FP8).view(n, k)

    def make_copy() -> Call:
        weight = codes.clone()

        def call(x: torch.Tensor) -> object:
            scales = torch.ones(len(x), k // 128, device=x.device)
            out = torch.empty(len(x), n, device=x.device, dtype=torch.bfloat16)
            numbers = x.view(torch.uint8)[:, :k].contiguous().view(FP8)
            package.fp8_gemm_nt((numbers, scales), (weight, scale), out)
            return out

        return call

    return make_copy


COLUMNS: dict[str, Callable[[torch.Tensor], Callable[[], Call]]] = {
    "bfloat16": dense,
    **{name: partial(packed, name) for name in PACKED},
    **{f"{name} rows": partial(packed, name, rows=True) for name in PACKED},
    "invariant": invariant,
    "scaled_mm": fp8_by_name,
    "FP8 rows": partial(scaled_mm, False),
    "FP8 rows, rounding x": partial(scaled_mm, True),
    "humming int4": partial(humming, "int4", 128),
    "humming int8": partial(humming, "int8", 0),
    "DeepGEMM": deep_gemm,
}
"""Name -> maker of products: from a matrix to a function that makes one more copy with its product."""
OURS = ("bfloat16", *PACKED)
QUICK = ("bfloat16", *(column for name in PACKED for column in (name, f"{name} rows")))
"""Columns of --packed."""
BATCHES = (2, 16, 17, 64, 128, 256)
"""Batch sizes whose first row is compared with the row alone."""
TILES = (
    (16, 64, 4, 4), (16, 64, 4, 6), (16, 128, 4, 3), (16, 128, 4, 4), (16, 128, 8, 4),
    (32, 64, 4, 4), (32, 128, 4, 3), (64, 64, 4, 3), (64, 128, 8, 3),
    (128, 128, 8, 3), (128, 64, 4, 3), (256, 64, 8, 3),
)  # fmt: skip
"""Candidates of --forms: rows, outputs, warps, stages."""
REPLAYS_S, FEWEST, MOST = 0.02, 3, 30
"""Seconds of replays for one measurement; minimum and maximum replays."""


def copies(n: int, k: int) -> int:
    return -(-ROTATED // (n * k))


def microseconds(calls: list[Callable[[], object]]) -> float:
    """Return the microseconds of one call, with all ``calls`` in sequence in one graph."""
    for call in calls:
        call()  # the first launch compiles, and a capture cannot compile
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    found: list[float] = []
    while len(found) < FEWEST or (len(found) < MOST and sum(found) < 1e3 * REPLAYS_S):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end))
    return 1e3 * statistics.median(found) / len(calls)


def column(make: Callable[[torch.Tensor], Callable[[], Call]], counts: Sequence[int]) -> dict[str, float]:
    """Microseconds of a layer's products, by the number of rows."""
    found: dict[str, float] = dict.fromkeys(map(str, counts), 0.0)
    for n, k in LAYER:
        make_copy = make(torch.randn(n, k, device="cuda").bfloat16())
        calls = [make_copy() for _ in range(copies(n, k))]
        for rows in counts:
            x = torch.randn(rows, k, device="cuda").bfloat16()
            found[str(rows)] += microseconds([partial(call, x) for call in calls])
        del calls, make_copy
        torch.cuda.empty_cache()
    return found


def bits(name: str) -> str:
    """Return the batch sizes in which a row has the same bits as alone, by default and with ``invariant``."""
    from weft.ops.registry import choose

    n, k = LAYER[1]
    codes = codes_on_gpu(torch.randn(n, k, device="cuda").bfloat16(), name)
    x = torch.randn(max(BATCHES), k, device="cuda").bfloat16()
    found = []
    for invariant in (False, True):
        op = choose("linear", torch.bfloat16, x.device, invariant=invariant)
        assert op.pack_codes is not None
        weight = op.pack_codes(codes)
        alone = op.run(x[:1].clone(), weight)
        same = [str(rows) for rows in BATCHES if torch.equal(op.run(x[:rows].clone(), weight)[:1], alone)]
        found.append(" ".join(same) or "none")
    return f"{name}: {found[0]}; invariant: {found[1]}"


def tiles(name: str, counts: Sequence[int], budget: float) -> Table:
    """Times of the kernel for words in several forms of tiles, without the limits of its table."""
    from weft.ops.triton import words, words_linear

    began = time.monotonic()
    found: Table = {}
    weights = []
    for n, k in LAYER:
        weight = words_linear.pack(codes_on_gpu(torch.randn(n, k, device="cuda").bfloat16(), name))
        weights.append([cloned(weight) for _ in range(copies(n, k))])
    for rows, outputs, warps, stages in TILES:
        form = words.WordForm(rows=rows, outputs=outputs, warps=warps, stages=stages)
        for many in (False, True):
            label = f"{rows}x{outputs}, {warps} warps, {stages} stages, {'many' if many else 'few'}"
            times = dict.fromkeys(map(str, counts), float("nan"))
            for count in counts:
                # Skip tiles with more rows than the batch, or with far fewer.
                if not rows // 2 < max(count, 9) <= 4 * rows or time.monotonic() - began > budget:
                    continue
                total = 0.0
                for (n, k), each in zip(LAYER, weights, strict=True):
                    x = torch.randn(count, k, device="cuda").bfloat16()
                    out = torch.empty(count, n, device="cuda", dtype=x.dtype)
                    total += microseconds([partial(words.run, x, one, None, out, form, many) for one in each])
                times[str(count)] = total
            found[label] = times
    return found


def copy_rate() -> float:
    """Return the bytes per second of a copy, read and written."""
    import triton

    source = torch.empty(4 << 30, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    milliseconds = float(triton.testing.do_bench(lambda: target.copy_(source)))
    return 2e3 * source.nbytes / milliseconds


def measure(
    names: Sequence[str], counts: Sequence[int], budget: float, tick: Callable[[str, Table], None]
) -> tuple[Table, dict[str, str]]:
    """Return (times by column, reasons of columns that failed). No column starts after ``budget`` seconds.

    ``tick`` is called after every column, with the times so far.
    """
    began = time.monotonic()
    found: Table = {}
    failed: dict[str, str] = {}
    for name in names:
        if time.monotonic() - began > budget:
            failed[name] = "no time was left"
            continue
        try:
            found[name] = column(COLUMNS[name], counts)
        except Exception as error:
            if name in OURS:
                raise
            failed[name] = f"{type(error).__name__}: {str(error)[:200]}"
        tick(f"products, {name}", found)
    return found, failed


def table(found: Table) -> str:
    """Return the times and the speed-ups over the first column, as Markdown."""
    rows = []
    for count, plain in next(iter(found.values())).items():
        row: dict[str, Any] = {"rows": f"{int(count):,}"}
        for name, times in found.items():
            row[name] = f"{times[count]:.0f} ({plain / times[count]:.2f})"
        rows.append(row)
    return record.markdown(rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--column", action="append", choices=tuple(COLUMNS), help="may be repeated; all by default"
    )
    parser.add_argument("--rows", type=int, nargs="+", help="numbers of rows of x")
    parser.add_argument(
        "--packed", action="store_true", help="packed formats with both kernels, for few numbers of rows"
    )
    parser.add_argument("--forms", choices=PACKED, help="time the kernel for words by tile size")
    parser.add_argument("--seconds", type=float, default=600.0, help="seconds after which no column starts")
    parser.add_argument("--json", type=Path, help="write everything to this file")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.gpu_products needs a CUDA GPU, and this torch sees none")
    if args.forms:
        print(table(tiles(args.forms, args.rows or (1, 16, 64, 256), args.seconds)))
        return
    counts = args.rows or (QUICK_ROWS if args.packed else ROWS)
    names = args.column or (QUICK if args.packed else tuple(COLUMNS))
    rate, device = copy_rate(), torch.cuda.get_device_name()
    with tqdm(unit="column") as bar:

        def tick(what: str, found: Table) -> None:
            bar.set_description(what)
            bar.update()
            tqdm.write(table(found).splitlines()[-1])

        found, failed = measure(names, counts, args.seconds, tick)
    page = (
        f"A copy moves {rate / 1e12:.2f} TB/s (read and written).\n\n"
        "Microseconds of the products of a layer of llama-3-8b (times as fast as the first column), by rows. "
        f"Weights come from memory, not from the L2 cache.\n\n{table(found)}"
    )
    each = [bits(name) for name in PACKED if name in found]
    if each:
        page += "\n\nBatches in which a row has the bits that it has alone:\n\n" + "\n".join(
            f"* {one}" for one in each
        )
    if failed:
        page += "\n\n" + "\n".join(f"* {name}: {reason}" for name, reason in failed.items())
    print(page)
    if args.json:
        numbers = {
            "device": device,
            "copy_bytes_per_second": rate,
            "microseconds": found,
            "failed": failed,
            "bits": each,
        }
        record.write(args.json, "bench.gpu_products", f"Products, {device}", page, numbers)


if __name__ == "__main__":
    main()
