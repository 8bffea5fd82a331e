"""Many requests through a pool that is always full, each compared with the same request alone."""

import dataclasses

import numpy as np
from engine_bench.engine_host import Work, open_engine
from script_tools.plain_ids import draw_ids

from lightserve.config import ServerConfig

_LEAST_USED_FRAC = 0.98


def press(config: ServerConfig, num_requests: int) -> bool:
    """Run requests all at once, and again one by one.

    Alone means: by an engine with one row, whose queue hands it one request after the other, so that no step ever has
    two. That spares the idle moments between requests, and nothing else.

    Args:
        config: Of the crowd's engine; its pool must hold far fewer than ``num_requests``, its queue all of them.
        num_requests: How many.

    Returns:
        Whether each got all its tokens, those it gets alone, and the pool was at its brim.
    """
    with open_engine(config) as host:
        works = _random_works(num_requests, host.boot.model.vocab_size)
        host.run(works)
        crowd, used_frac = host.outputs, host.most_used_slots / host.num_slots
    lengths = [work.abort_after or work.output_len for work in works]
    with open_engine(dataclasses.replace(config, running_max_req_size=1)) as host:
        host.run([Work(work.prompt_ids, length) for work, length in zip(works, lengths, strict=True)])
        alone = host.outputs
        num_together = max(step.num_decode for step in host.steps)
    complete = sum(len(ids) >= length for ids, length in zip(crowd, lengths, strict=True))
    # A client that leaves may still get a token or two that were on their way.
    equal = sum(ids[:length] == whole for ids, whole, length in zip(crowd, alone, lengths, strict=True))
    num_left = sum(work.abort_after > 0 for work in works)
    print(
        f"{num_requests} requests, of which {num_left} were left by their clients, in {used_frac:.1%} of the pool: "
        f"{complete} complete, {equal} with the ids they get alone"
    )
    return complete == equal == num_requests and num_together == 1 and used_frac >= _LEAST_USED_FRAC


def _random_works(num_requests: int, vocab_size: int) -> list[Work]:
    random = np.random.default_rng(0)
    works = []
    for _ in range(num_requests):
        prompt_ids = draw_ids(random, vocab_size, int(random.integers(1, 200))).tolist()
        output_len = int(random.integers(1, 32))
        leaves = random.random() < 0.2
        works.append(Work(prompt_ids, output_len, abort_after=int(random.integers(1, output_len + 1)) if leaves else 0))
    return works
