"""Check each kernel against its reference, then time it on a CUDA device.

    bench_kernels.py decode_attention [more names] [--repeats 3] [--json FILE]
    bench_kernels.py all

Times are medians of graph replays after a warm-up, on random data, over input sets that together exceed the
second-level cache; with --repeats medians of as many such measurements. Rates are shares of two ceilings measured
first: a large copy (bytes read plus written) and a large bfloat16 product. Exit status: 1 if a kernel errs.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))  # PYTHONSAFEPATH leaves it out

import torch
import triton
from kernel_bench.attention import decode_attention_cases, prefill_attention_cases
from kernel_bench.case import Case
from kernel_bench.elementwise import embedding_cases, rms_norm_cases, rope_kv_write_cases, silu_mul_cases
from kernel_bench.products import gated_gemm_cases, gemv_cases, skinny_gemm_cases
from kernel_bench.result import Ceilings, Result, Times, format_result, summarize
from kernel_bench.sampling import forbid_cases, greedy_cases, penalties_cases, sampling_cases
from kernel_bench.timing import measure_ceilings, time_case
from kernel_bench.token_bookkeeping import commit_tokens_cases, copy_words_cases, place_tokens_cases
from script_tools.flags import output_file, positive_int
from script_tools.json_file import write_json
from script_tools.surroundings import describe_surroundings

KERNELS: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": rms_norm_cases,
    "rope_kv_write": rope_kv_write_cases,
    "silu_mul": silu_mul_cases,
    "embedding": embedding_cases,
    "decode_attention": decode_attention_cases,
    "prefill_attention": prefill_attention_cases,
    "gemv": gemv_cases,
    "skinny_gemm": skinny_gemm_cases,
    "gated_gemm": gated_gemm_cases,
    "greedy": greedy_cases,
    "sampling": sampling_cases,
    "penalties": penalties_cases,
    "forbid": forbid_cases,
    "copy_words": copy_words_cases,
    "place_tokens": place_tokens_cases,
    "commit_tokens": commit_tokens_cases,
}


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    if not torch.cuda.is_available():
        print("bench_kernels.py: there is no CUDA device", file=sys.stderr)
        return 1
    torch.set_default_device("cuda")
    torch.manual_seed(0)
    device, ceilings = torch.cuda.get_device_name(), measure_ceilings(options.repeats)
    print(f"{device}, torch {torch.__version__}, triton {triton.__version__}")
    print(f"copy {ceilings.copy_tb_s:.2f} TB/s, product {ceilings.product_tflop_s:.0f} TFLOP/s")
    names = KERNELS if "all" in options.names else options.names
    kernels = {name: KERNELS[name] for name in names}
    results = check_and_time(kernels, partial(time_case, repeats=options.repeats), ceilings)
    if options.json:
        write_json(options.json, report(arguments, device, ceilings, options.repeats, results))
    return exit_status(results)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="+", choices=["all", *KERNELS])
    parser.add_argument("--repeats", type=positive_int, default=1, help="measurements of each case (%(default)s)")
    parser.add_argument("--json", type=output_file, help="write all numbers there")
    return parser.parse_args(arguments)


def check_and_time(
    kernels: Mapping[str, Callable[[], Iterator[Case]]], time: Callable[[Case], Times], ceilings: Ceilings
) -> list[Result]:
    """Print each case's line as soon as it is measured."""
    results = []
    for name, cases in kernels.items():
        for case in cases():
            results.append(summarize(name, case, case.error(), time(case), ceilings))
            print(format_result(results[-1]), flush=True)
    return results


def report(
    arguments: Sequence[str], device: str, ceilings: Ceilings, repeats: int, results: Sequence[Result]
) -> dict[str, Any]:
    return describe_surroundings(["bench_kernels.py", *arguments]) | {
        "device": device,  # so, and two versions, are they called in files of earlier runs
        "torch": str(torch.__version__),
        "triton": triton.__version__,
        **asdict(ceilings),
        "repeats": repeats,
        "results": results,
    }


def exit_status(results: Sequence[Result]) -> int:
    """Name the kernels that err."""
    wrong = [result for result in results if result.is_wrong]
    for result in wrong:
        print(f"WRONG: {result.kernel} {result.case}: error {result.error:.2e}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
