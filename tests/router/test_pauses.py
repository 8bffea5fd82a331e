"""Requests that are paused for want of slots, under a real engine: they come back as if nothing had been (CASES H3)."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from lightserve.ipc.messages import FinishCode, StepPlan, StepResult, TokensMsg, unpack_float32, unpack_int64
from lightserve.model_worker.cpu.runner import CpuEngine
from lightserve.model_worker.engine import StepOutput
from lightserve.router.past_future import PastFutureAdmission
from lightserve.sampling_params import SamplingParams
from tests.model_worker.tiny_checkpoint import write_checkpoint
from tests.model_worker.tiny_engine import generate, open_engine, random_prompts
from tests.router.harness import LIMITS, Harness

NUM_TOKENS = 60
PROMPTS = random_prompts((5, 23, 1, 40, 12, 5, 31, 8))
PLAIN = SamplingParams(NUM_TOKENS, temperature=0.0)
WITH_PENALTIES = replace(PLAIN, repetition_penalty=1.2, presence_penalty=0.5, frequency_penalty=0.3)
SAMPLING = {
    "greedy": [PLAIN] * len(PROMPTS),
    "greedy, penalties": [WITH_PENALTIES] * len(PROMPTS),
    "sampled, penalties": [
        replace(WITH_PENALTIES, temperature=0.9, top_k=40, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))
    ],
}


class EngineHarness(Harness):
    """A router over an engine, with a pool for about two requests and a policy that expects answers of two tokens."""

    def __init__(self, engine: CpuEngine, *, has_prefix_cache: bool) -> None:
        pool, rows = 2 * (max(map(len, PROMPTS)) + NUM_TOKENS), len(PROMPTS)
        admission = PastFutureAdmission(pool, rows, LIMITS.max_req_total_len, 0.5)
        for _ in range(200):
            admission.observe_end(0, 2, is_natural=True)
        super().__init__(
            admission,
            max_total_token_num=pool,
            running_max_req_size=rows,
            has_prefix_cache=has_prefix_cache,
            eos_token_ids=(),
        )
        self.logprobs: dict[int, list[float]] = {}
        self._engine = engine
        self._launched: StepOutput | None = None

    def step(self, plan: StepPlan) -> StepResult | None:
        """Launch a step, and return the result of the one before."""
        previous, self._launched = self._launched, self._engine.step(plan)
        return previous.result() if previous else None

    def flush(self) -> StepResult | None:
        """Return the result of the last step."""
        previous, self._launched = self._launched, None
        return previous.result() if previous else None

    def take_tokens(self, message: TokensMsg) -> None:
        """Keep the logprobs, too."""
        super().take_tokens(message)
        for req_id, logprob in zip(unpack_int64(message.req_ids), unpack_float32(message.logprobs), strict=True):
            self.logprobs.setdefault(int(req_id), []).append(float(logprob))


@pytest.mark.parametrize("has_prefix_cache", [True, False])
@pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING)
def test_ids_and_logprobs_after_pauses_equal_those_of_uninterrupted_runs(
    sampling: list[SamplingParams], has_prefix_cache: bool, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path)
    engine = open_engine(tmp_path)
    alone = [generate(engine, [ids], params)[0] for ids, params in zip(PROMPTS, sampling, strict=True)]
    harness = EngineHarness(engine, has_prefix_cache=has_prefix_cache)
    for req_id, (ids, params) in enumerate(zip(PROMPTS, sampling, strict=True)):
        harness.submit(req_id, ids, params)

    harness.run()

    assert harness.scheduler.num_pauses > 0
    for req_id, expected in enumerate(alone):
        assert harness.seen[req_id].output_ids == expected.output_ids
        assert harness.seen[req_id].finish == FinishCode.LENGTH
        assert harness.logprobs[req_id] == pytest.approx(expected.logprobs, abs=1e-4)
    assert harness.loads[-1].used_slots == 0
