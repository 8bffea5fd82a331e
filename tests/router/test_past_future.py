import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightserve.ipc.messages import FinishCode
from lightserve.router.admission import NOBODY, Claim
from lightserve.router.output_lengths import OutputLengths
from lightserve.router.past_future import PastFutureAdmission
from lightserve.sampling_params import SamplingParams
from tests.router.fake_worker import expected_ids
from tests.router.harness import LIMITS, Harness

MAX_ROWS = 64
NOBODY_RUNS = np.zeros(0, dtype=np.int64)


def claim(slots: int, max_new_tokens: int, *, ignores_eos: bool = False) -> Claim:
    return Claim(slots, 0, 0, max_new_tokens, ignores_eos)


def taught(*lengths: int, pool: int = 10_000, max_overflow_prob: float = 0.02) -> PastFutureAdmission:
    """Make a policy that has seen answers of these lengths."""
    admission = PastFutureAdmission(pool, MAX_ROWS, 4096, max_overflow_prob)
    for length in lengths:
        admission.observe_end(0, length, is_natural=True)
    admission.begin_step(0)
    return admission


def num_admitted(admission: PastFutureAdmission, new: Claim) -> int:
    for row in range(MAX_ROWS):
        if not admission.fits(new):
            return row
        admission.add(row, new)
    return MAX_ROWS


def test_survival_is_the_share_of_longer_answers() -> None:
    lengths = OutputLengths(1000)
    for length in range(1, 101):
        lengths.add(length, is_natural=True)
    survival = lengths.survival(NOBODY_RUNS)
    assert survival[0] == 1
    assert survival[50] == pytest.approx(0.5, abs=0.02)
    assert survival[100] > 0  # what never happened is not impossible


def test_those_who_still_run_and_those_cut_off_make_the_estimate_longer() -> None:
    def median(num_cut: int, num_running: int) -> int:
        lengths = OutputLengths(1000)
        for length in range(1, 51):
            lengths.add(length, is_natural=True)
        for _ in range(num_cut):
            lengths.add(20, is_natural=False)
        running = np.full(num_running, 30, dtype=np.int64)
        return int(np.argmax(lengths.survival(running) < 0.5))

    assert median(0, 0) < median(50, 0)
    assert median(0, 0) < median(0, 50)


def test_the_window_slides() -> None:
    lengths = OutputLengths(10)
    for length in [5] * 10 + [50] * 10:
        lengths.add(length, is_natural=True)
    assert lengths.survival(NOBODY_RUNS)[49] == pytest.approx(1)


def test_without_experience_everybody_is_taken_to_produce_all_they_may() -> None:
    assert num_admitted(taught(), claim(100, 901)) == 10


def test_short_answers_of_late_let_more_join() -> None:
    assert 30 < num_admitted(taught(*[100] * 200), claim(100, 901)) <= 50


def test_who_ignores_eos_is_taken_at_its_word() -> None:
    assert num_admitted(taught(*[100] * 200), claim(100, 901, ignores_eos=True)) == 10


def test_a_smaller_chance_of_overflow_lets_fewer_join() -> None:
    lengths = [10, 500] * 100
    careful, bold = (num_admitted(taught(*lengths, max_overflow_prob=prob), claim(100, 901)) for prob in (1e-6, 0.3))
    assert 10 < careful < bold


def test_one_who_has_outlived_all_others_may_go_on_to_the_end() -> None:
    admission = taught(*[100] * 200)
    admission.add(0, claim(100, 3901))
    admission.begin_step(600)
    assert admission.peak() > 3500


def test_what_several_share_counts_once_and_to_the_end() -> None:
    admission = taught(*[100] * 200)
    for row in range(3):
        admission.add(row, claim(10, 100, ignores_eos=True))
    payer = NOBODY
    for row in range(3):
        payer = admission.join(payer, row, 500)
    assert admission.peak() == pytest.approx(500 + 3 * 109, abs=1)
    admission.remove(0)
    admission.remove(1)
    payer = admission.leave(payer, 1, {2}, 500)
    assert payer == 2
    assert admission.peak() == pytest.approx(500 + 109, abs=1)
    admission.remove(2)
    assert admission.leave(payer, 2, (), 500) == NOBODY
    assert admission.peak() == 0


def past_future_harness(pool: int, rows: int = 8) -> Harness:
    """Make a router whose policy believes that answers are very short, so that it overflows again and again."""
    admission = PastFutureAdmission(pool, rows, LIMITS.max_req_total_len, 0.5)
    for _ in range(200):
        admission.observe_end(0, 2, is_natural=True)
    return Harness(admission, max_total_token_num=pool, running_max_req_size=rows)


def test_the_youngest_is_paused_and_resumes_with_nothing_lost_or_told_twice() -> None:
    harness = past_future_harness(100)
    prompts = {req_id: [req_id, 1, 2, 3, 4] for req_id in range(8)}
    sampling = SamplingParams(80)
    for req_id, prompt_ids in prompts.items():
        harness.submit(req_id, prompt_ids, sampling)
    harness.run()
    assert harness.scheduler.num_pauses > 0
    assert harness.loads[-1].num_pauses == harness.scheduler.num_pauses
    for req_id, prompt_ids in prompts.items():
        assert harness.seen[req_id].output_ids == expected_ids(prompt_ids, sampling, LIMITS.eos_token_ids)


@settings(max_examples=100)
@given(
    requests=st.lists(
        st.tuples(st.lists(st.integers(0, 3), min_size=1, max_size=40), st.integers(1, 70)), min_size=1, max_size=15
    ),
    pool=st.integers(110, 200),
    rows=st.integers(1, 8),
)
def test_everybody_finishes_however_wrong_the_guesses_are(
    requests: list[tuple[list[int], int]], pool: int, rows: int
) -> None:
    harness = past_future_harness(pool, rows)
    for req_id, (prompt_ids, max_new_tokens) in enumerate(requests):
        harness.submit(req_id, prompt_ids, SamplingParams(max_new_tokens))
    harness.run()
    for req_id, (prompt_ids, max_new_tokens) in enumerate(requests):
        expected = expected_ids(prompt_ids, SamplingParams(max_new_tokens), LIMITS.eos_token_ids)
        assert harness.seen[req_id].output_ids == expected
        assert harness.seen[req_id].finish in (FinishCode.STOP, FinishCode.LENGTH)
    assert harness.loads[-1].used_slots == 0


def test_the_oldest_is_never_paused() -> None:
    harness = past_future_harness(130)
    for req_id in range(8):
        harness.submit(req_id, [req_id, 1, 2, 3, 4], SamplingParams(100, ignore_eos=False, stop_token_ids=(3,)))
    harness.run()
    assert harness.scheduler.num_pauses > 0
    first_rows = [plan.new_reqs for plan in harness.worker.plans]
    stays_of_the_oldest = sum(new.ids[:4] == b"\0\0\0\0" for new_reqs in first_rows for new in new_reqs)
    assert stays_of_the_oldest == 1
