"""Check each kernel against its reference, then time it on a CUDA device.

    python scripts/bench_kernels.py decode_attention [more names] [--json FILE]
    python scripts/bench_kernels.py all

Times are medians of graph replays after a warm-up, on random data, over input sets that together exceed the
second-level cache. Rates are shares of two ceilings measured first: a large copy (bytes read plus written) and a large
bfloat16 product.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import triton

from lightserve.kernels import decode_attention as decode
from lightserve.kernels import draw, greedy, sampling, uniform
from lightserve.kernels import embedding as embed
from lightserve.kernels import gemv as vector
from lightserve.kernels import penalties as penalty
from lightserve.kernels import prefill_attention as prefill
from lightserve.kernels import rms_norm as norm
from lightserve.kernels import rope_kv_write as rope
from lightserve.kernels import silu_mul as silu
from lightserve.kernels import skinny_gemm as gemm
from lightserve.kernels.decode_plan import plan_decode

BF16 = torch.bfloat16
CACHE_BYTES = 64 << 20  # more than the second-level cache of an H200
NUM_HEADS, NUM_KV_HEADS = 32, 8
VOCAB_SIZE = 128_256
TOLERANCE = 1e-2  # of ‖out - ref‖ / ‖ref‖; for sampling, the share of rows drawn on another side of a border


@dataclass
class Case:
    """One thing to time.

    Attributes:
        name: Its sizes.
        runs: The same work on different memory.
        error: Compares the first run with the reference.
        bytes: Moved by one run.
        flops: Done by one run; given where they, not bytes, are the limit.
        rival: The same work by the vendor's library.
    """

    name: str
    runs: Sequence[Callable[[], object]]
    error: Callable[[], float]
    bytes: float = 0
    flops: float = 0
    rival: Sequence[Callable[[], object]] = ()


@dataclass
class Result:
    """What was measured; ``rate`` in TB/s or TFLOP/s, ``share`` of the measured ceiling."""

    kernel: str
    case: str
    error: float
    time_us: float
    rate: float
    unit: str
    share: float
    rival_us: float | None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=["all", *KERNELS])
    parser.add_argument("--json", type=Path, help="write all numbers there")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_kernels.py: there is no CUDA device", file=sys.stderr)
        return 1
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    copy_rate, product_rate = measure_copy(), measure_product()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {copy_rate:.2f} TB/s, product {product_rate:.0f} TFLOP/s")
    results = []
    for name in KERNELS if "all" in arguments.names else arguments.names:
        for case in KERNELS[name]():
            results.append(measure(name, case, copy_rate, product_rate))
            print(format_result(results[-1]), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(report(results, copy_rate, product_rate), indent=1))
    wrong = [result for result in results if not result.error <= TOLERANCE]
    for result in wrong:
        print(f"WRONG: {result.kernel} {result.case}: error {result.error:.2e}", file=sys.stderr)
    return 1 if wrong else 0


def measure(kernel: str, case: Case, copy_rate: float, product_rate: float) -> Result:
    error = case.error()
    time_us = time_runs(case.runs)
    rate, unit, ceiling = (
        (case.flops / time_us / 1e6, "TFLOP/s", product_rate)
        if case.flops
        else (case.bytes / time_us / 1e6, "TB/s", copy_rate)
    )
    rival_us = time_runs(case.rival) if case.rival else None
    return Result(kernel, case.name, error, time_us, rate, unit, rate / ceiling, rival_us)


def format_result(result: Result) -> str:
    rival = "" if result.rival_us is None else f"   cuBLAS {result.rival_us:.1f} µs"
    return (
        f"{result.kernel:18} {result.case:28} error {result.error:.1e} {result.time_us:9.1f} µs "
        f"{result.rate:7.2f} {result.unit:7} {result.share:6.1%}{rival}"
    )


def report(results: list[Result], copy_rate: float, product_rate: float) -> dict[str, object]:
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "copy_tb_s": copy_rate,
        "product_tflop_s": product_rate,
        "results": [asdict(result) for result in results],
    }


def time_runs(runs: Sequence[Callable[[], object]], replays: int = 9) -> float:
    """Capture the runs in one graph; give the median time of one, in µs."""
    for run in runs[:2]:
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for run in runs:
            run()
    graph.replay()
    return time_events(graph.replay, replays) / len(runs)


def time_events(work: Callable[[], object], repeats: int) -> float:
    """Give the median time of ``work``, in µs."""
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def measure_copy() -> float:
    source = torch.randn(1 << 30, dtype=BF16)
    target = torch.empty_like(source)
    return 2 * source.nbytes / time_events(lambda: target.copy_(source), 12) / 1e6


def measure_product() -> float:
    a, b = torch.randn(8192, 8192, dtype=BF16), torch.randn(8192, 8192, dtype=BF16)
    return 2 * 8192**3 / time_events(lambda: a @ b, 12) / 1e6


def relative_error(out: torch.Tensor, reference: torch.Tensor) -> float:
    return float((out.double() - reference.double()).norm() / reference.double().norm())


def copies(bytes_per_run: float, most: int = 16) -> range:
    """Give enough sets of inputs for a run to find nothing of its last one in the cache."""
    return range(max(2, min(most, int(3 * CACHE_BYTES / bytes_per_run) + 1)))


def bench_rms_norm() -> Iterator[Case]:
    weight = torch.randn(4096, dtype=BF16)
    for n in (1, 64, 8192):
        size = 4 * n * 4096 * 2
        sets = [(torch.randn(n, 4096, dtype=BF16), torch.randn(n, 4096, dtype=BF16)) for _ in copies(size)]
        runs = [partial(norm.add_rms_norm, x, residual, weight, 1e-5) for x, residual in sets]
        yield Case(f"add, {n} x 4096", runs, partial(add_rms_norm_error, *sets[0], weight), bytes=size)


def add_rms_norm_error(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> float:
    expected = norm.add_rms_norm_reference(x, residual.clone(), weight, 1e-5)
    return relative_error(norm.add_rms_norm(x, residual.clone(), weight, 1e-5), expected)


def bench_rope_kv_write() -> Iterator[Case]:
    rotation = rope.Rotation(torch.randn(8192, 128))
    cache = torch.zeros(65536, 2, NUM_KV_HEADS, 128, dtype=BF16)
    for n in (1, 64, 8192):
        width = (NUM_HEADS + 2 * NUM_KV_HEADS) * 128
        positions, slots = torch.arange(n).int(), torch.randperm(len(cache))[:n].int()
        sets = [torch.randn(n, width, dtype=BF16) for _ in copies(2 * n * width * 2)]
        runs = [
            partial(rope.rope_kv_write, qkv, rotation, positions, slots, cache, num_heads=NUM_HEADS) for qkv in sets
        ]
        yield Case(
            f"{n} x 32/8 x 128",
            runs,
            partial(rope_error, sets[0], rotation, positions, slots, cache),
            bytes=2 * n * width * 2,
        )


def rope_error(
    qkv: torch.Tensor, rotation: rope.Rotation, positions: torch.Tensor, slots: torch.Tensor, cache: torch.Tensor
) -> float:
    cache.zero_()
    expected_cache = cache.clone()
    expected = rope.rope_kv_write_reference(qkv, rotation, positions, slots, expected_cache, num_heads=NUM_HEADS)
    out = rope.rope_kv_write(qkv, rotation, positions, slots, cache, num_heads=NUM_HEADS)
    return max(relative_error(out, expected), relative_error(cache, expected_cache))


def bench_silu_mul() -> Iterator[Case]:
    for n in (1, 64, 8192):
        size = 3 * n * 14336 * 2
        sets = [torch.randn(n, 2 * 14336, dtype=BF16) for _ in copies(size)]
        error = partial(error_against, silu.silu_mul, silu.silu_mul_reference, sets[0])
        yield Case(f"{n} x 14336", [partial(silu.silu_mul, x) for x in sets], error, bytes=size)


def bench_embedding() -> Iterator[Case]:
    table = torch.randn(VOCAB_SIZE, 4096, dtype=BF16)
    for n in (64, 8192):
        size = 2 * n * 4096 * 2
        sets = [torch.randint(0, VOCAB_SIZE, (n,), dtype=torch.int32) for _ in copies(size)]
        error = partial(error_against, embed.embedding, embed.embedding_reference, sets[0], table)
        yield Case(f"{n} x 4096", [partial(embed.embedding, ids, table) for ids in sets], error, bytes=size)


def error_against(
    kernel: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], *arguments: torch.Tensor
) -> float:
    return relative_error(kernel(*arguments), reference(*arguments))


def bench_decode_attention() -> Iterator[Case]:
    for head_dim in (128, 64):
        num_slots = 1024 * 512 + 1
        cache = torch.randn(num_slots, 2, NUM_KV_HEADS, head_dim, dtype=BF16)
        for n, seq_len in ((16, 4096), (64, 2048), (256, 512), (1024, 512), (1, 32768), (1, 8192)):
            yield decode_case(cache, [seq_len] * n, f"{n} x {seq_len}, 32/8 x {head_dim}")
        lengths = torch.randint(50, 2000, (256,)).tolist()
        yield decode_case(cache, lengths, f"256 x 50-2000, 32/8 x {head_dim}")


def decode_case(cache: torch.Tensor, lengths: list[int], name: str) -> Case:
    head_dim, n = cache.shape[3], len(lengths)
    size = sum(lengths) * 2 * NUM_KV_HEADS * head_dim * 2
    rows, seq_lens = torch.arange(n).int(), torch.tensor(lengths, dtype=torch.int32)
    tables = [scatter(lengths, len(cache)) for _ in copies(size)]
    q = torch.randn(n, NUM_HEADS, head_dim, dtype=BF16)
    out = torch.full_like(q, float("nan"))
    plan = plan_decode(rows, seq_lens, num_heads=NUM_HEADS, num_kv_heads=NUM_KV_HEADS, head_dim=head_dim)
    scale = head_dim**-0.5

    def run(table: torch.Tensor) -> torch.Tensor:
        return decode.decode_attention(q, cache, table, rows, seq_lens, scale=scale, plan=plan, out=out)

    def error() -> float:
        expected = decode.decode_attention_reference(q, cache, tables[0], rows, seq_lens, scale=scale)
        return relative_error(run(tables[0]), expected)

    return Case(name, [partial(run, table) for table in tables], error, bytes=size)


def scatter(lengths: list[int], num_slots: int) -> torch.Tensor:
    """Give every request random slots of its own; [len(lengths), longest] int32."""
    table = torch.zeros(len(lengths), max(lengths), dtype=torch.int32)
    slots, start = torch.randperm(num_slots).int(), 0
    for row, length in enumerate(lengths):
        table[row, :length] = slots[start : start + length]
        start += length
    return table


def bench_prefill_attention() -> Iterator[Case]:
    mixed = (torch.randint(20, 1500, (12,)).tolist(), torch.randint(0, 3000, (12,)).tolist())
    batches = {
        "1 x 2048": ([2048], [0]),
        "1 x 8192": ([8192], [0]),
        "4 x 2048": ([2048] * 4, [0] * 4),
        "16 x 512": ([512] * 16, [0] * 16),
        "1 x 2048 after 6144": ([2048], [6144]),
        "12 x 20-1500 after 0-3000": mixed,
        "64 x 32 after 1024": ([32] * 64, [1024] * 64),
    }
    for head_dim in (128, 64):
        cache = torch.randn(131072, 2, NUM_KV_HEADS, head_dim, dtype=BF16)
        for name, (extend_lens, cached_lens) in batches.items():
            yield prefill_case(cache, extend_lens, cached_lens, f"{name}, x {head_dim}")


def prefill_case(cache: torch.Tensor, extend_lens: list[int], cached_lens: list[int], name: str) -> Case:
    head_dim, n = cache.shape[3], len(extend_lens)
    lengths = [extend + cached for extend, cached in zip(extend_lens, cached_lens, strict=True)]
    rows, seq_lens = torch.arange(n).int(), torch.tensor(lengths, dtype=torch.int32)
    cu_seqlens = torch.tensor([0, *accumulate(extend_lens)], dtype=torch.int32)
    q = torch.randn(sum(extend_lens), NUM_HEADS, head_dim, dtype=BF16)
    out = torch.full_like(q, float("nan"))
    scale = head_dim**-0.5

    def run(table: torch.Tensor, plan: prefill.PrefillPlan) -> torch.Tensor:
        batch = (table, rows, cu_seqlens, seq_lens)
        return prefill.prefill_attention(q, cache, *batch, scale=scale, plan=plan, out=out)

    def plan(table: torch.Tensor) -> prefill.PrefillPlan:
        gather_len = prefill.gather_len_for(extend_lens, lengths)
        return prefill.plan_prefill(
            table,
            rows,
            cu_seqlens,
            seq_lens,
            num_tokens=len(q),
            num_heads=NUM_HEADS,
            num_kv_heads=NUM_KV_HEADS,
            gather_len=gather_len,
        )

    def error() -> float:
        expected = prefill.prefill_attention_reference(q, cache, tables[0], rows, cu_seqlens, seq_lens, scale=scale)
        return relative_error(run(tables[0], plan(tables[0])), expected)

    tables = [scatter(lengths, len(cache)) for _ in range(2)]
    scores = sum(extend * (cached + (extend + 1) / 2) for extend, cached in zip(extend_lens, cached_lens, strict=True))
    runs = [partial(run, table, plan(table)) for table in tables]
    return Case(name, runs, error, flops=4 * head_dim * NUM_HEADS * scores)


PRODUCTS = {  # rows of the weight, width of x
    "8B qkv": (6144, 4096),
    "8B out": (4096, 4096),
    "8B gate_up": (28672, 4096),
    "8B down": (4096, 14336),
    "8B head": (VOCAB_SIZE, 4096),
    "1B qkv": (3072, 2048),
    "1B out": (2048, 2048),
    "1B gate_up": (16384, 2048),
    "1B down": (2048, 8192),
    "1B head": (VOCAB_SIZE, 2048),
}


def bench_gemv() -> Iterator[Case]:
    for name in PRODUCTS:
        yield from product_cases(name, vector.gemv, vector.gemv_reference, [1])


def bench_skinny_gemm() -> Iterator[Case]:
    for name in PRODUCTS:
        yield from product_cases(name, gemm.skinny_gemm, gemm.skinny_gemm_reference, [4, 16, 64])


def product_cases(
    name: str, kernel: Callable[..., torch.Tensor], reference: Callable[..., torch.Tensor], row_counts: Sequence[int]
) -> Iterator[Case]:
    (n, k), gated = PRODUCTS[name], name.endswith("gate_up")
    weights = [torch.randn(n, k, dtype=BF16) for _ in copies(2 * n * k)]
    for m in row_counts:
        x = torch.randn(m, k, dtype=BF16)
        yield Case(
            f"{name}, m = {m}",
            [partial(kernel, x, weight, gated=gated) for weight in weights],
            partial(error_against, partial(kernel, gated=gated), partial(reference, gated=gated), x, weights[0]),
            bytes=2 * (n * k + m * k + m * n // (2 if gated else 1)),
            rival=[partial(library_product, x, weight, gated=gated) for weight in weights],
        )


def library_product(x: torch.Tensor, weight: torch.Tensor, *, gated: bool) -> torch.Tensor:
    product = torch.nn.functional.linear(x, weight)
    return silu.silu_mul(product) if gated else product


def bench_sampling() -> Iterator[Case]:
    for n in (1, 64, 256):
        size = n * VOCAB_SIZE * 4
        sets = [torch.randn(n, VOCAB_SIZE) * 2 for _ in copies(size)]  # float32, as the head gives them
        runs = [partial(greedy.greedy, logits, vocab_size=VOCAB_SIZE) for logits in sets]
        yield Case(f"greedy, {n} x {VOCAB_SIZE}", runs, partial(greedy_error, sets[0]), bytes=size)
        for top_k, top_p in ((0, 1.0), (50, 0.9), (0, 0.9)):
            parameters = (
                torch.full((n,), 0.8),
                torch.full((n,), top_k, dtype=torch.int32),
                torch.full((n,), top_p),
                torch.zeros(n),
                torch.randint(0, 1 << 60, (n,)),
                torch.arange(n).int(),
            )
            draws = [partial(sampling.sample, logits, *parameters, vocab_size=VOCAB_SIZE) for logits in sets]
            name = f"top-k {top_k}, top-p {top_p}, {n} x {VOCAB_SIZE}"
            yield Case(name, draws, partial(drawn_elsewhere, sets[0], parameters), bytes=size)


def greedy_error(logits: torch.Tensor) -> float:
    token_ids, logprobs = greedy.greedy(logits, vocab_size=VOCAB_SIZE)
    expected_ids, expected_logprobs = greedy.greedy_reference(logits, vocab_size=VOCAB_SIZE)
    return float((token_ids != expected_ids).double().mean()) + relative_error(logprobs, expected_logprobs)


def drawn_elsewhere(logits: torch.Tensor, parameters: tuple[torch.Tensor, ...]) -> float:
    """Measure the share of rows whose token is not where the uniform number falls, within float32's error."""
    token_ids = sampling.sample(logits, *parameters, vocab_size=VOCAB_SIZE)[0].long().unsqueeze(1)
    raw = logits.double()
    scaled = (raw - raw.amax(1, keepdim=True)) / parameters[0].unsqueeze(1)
    mass = draw.kept_mass_reference(scaled, *parameters[1:4])
    share = mass / mass.sum(1, keepdim=True)
    upper = share.cumsum(1).gather(1, token_ids)
    lower = upper - share.gather(1, token_ids)
    number = uniform.uniform_reference(*parameters[4:]).double().unsqueeze(1)
    inside = (lower - 1e-5 <= number) & (number <= upper + 1e-5) & (share.gather(1, token_ids) > 0)
    return float((~inside).double().mean())


def bench_penalties() -> Iterator[Case]:
    n = 256
    arguments = (
        torch.randn(n, VOCAB_SIZE, dtype=BF16),
        torch.randint(0, 2, (n, VOCAB_SIZE), dtype=torch.int32),
        torch.arange(n).int(),
        *(torch.full((n,), value) for value in (1.1, 0.5, 0.5)),
    )
    error = partial(error_against, penalty.penalties, penalty.penalties_reference, *arguments)
    runs = [partial(penalty.penalties, *arguments)] * 2
    yield Case(f"{n} x {VOCAB_SIZE}", runs, error, bytes=n * VOCAB_SIZE * (2 + 4 + 4))


KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": bench_rms_norm,
    "rope_kv_write": bench_rope_kv_write,
    "silu_mul": bench_silu_mul,
    "embedding": bench_embedding,
    "decode_attention": bench_decode_attention,
    "prefill_attention": bench_prefill_attention,
    "gemv": bench_gemv,
    "skinny_gemm": bench_skinny_gemm,
    "sampling": bench_sampling,
    "penalties": bench_penalties,
}

if __name__ == "__main__":
    sys.exit(main())
