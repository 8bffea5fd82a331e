"""One tensor-parallel rank as a program: ``rank_process.py FOLDER RANK`` runs every model in the folder.

Prints what they generated, as JSON.
"""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.append(str(Path(__file__).parents[2]))

from lightserve.model_worker.tensor_parallel import Ranks, join_ranks
from lightserve.sampling_params import SamplingParams
from tests.model_worker.tiny_engine import CPU, generate, open_engine, random_prompts

PROMPTS = random_prompts([5, 30, 1])
SAMPLING = [
    SamplingParams(12, temperature=0.0),
    SamplingParams(12, temperature=1.0, seed=3, top_p=0.9),
    SamplingParams(12, temperature=0.0, repetition_penalty=1.5),
]


def main(folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    ranks = join_ranks(str(folder), rank, 2, CPU)
    models = sorted(path for path in folder.iterdir() if path.is_dir())
    json.dump({path.name: run(path, ranks) for path in models}, sys.stdout)
    dist.destroy_process_group()


def run(model: Path, ranks: Ranks) -> list[tuple[list[int], list[float]]]:
    """Ids and log-probabilities of every prompt."""
    reqs = generate(open_engine(model, ranks=ranks), PROMPTS, SAMPLING, chunk=7)
    return [(req.output_ids, req.logprobs) for req in reqs]


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
