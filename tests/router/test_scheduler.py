from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightserve.errors import InvariantError
from lightserve.ipc.messages import (
    AbortMsg,
    FinishCode,
    GenerateMsg,
    LoadMsg,
    StepResult,
    StopMsg,
    TextParams,
    pack_float32,
    pack_int32,
    unpack_int32,
)
from lightserve.sampling_params import SamplingParams
from tests.router.fake_worker import expected_ids
from tests.router.harness import LIMITS, Harness

EOS_IDS = LIMITS.eos_token_ids


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + position * 7 + position * position) % 50 for position in range(length)]


def prompt_that_ends_by_eos(after: int) -> list[int]:
    """Find a prompt after which the fake model's ``after``-th id is the first end-of-sequence id."""
    for seed in range(10_000):
        prompt_ids = [seed % 50, seed // 50 % 50, seed // 2500]
        if len(expected_ids(prompt_ids, SamplingParams(100), EOS_IDS)) == after:
            return prompt_ids
    raise AssertionError("none found")


def is_idle(load: LoadMsg) -> bool:
    return load == LoadMsg(0, 0, 0, load.cached_slots, 0, 0, load.max_total_token_num)


def check_all(harness: Harness, submitted: dict[int, tuple[list[int], SamplingParams]]) -> None:
    for req_id, (prompt_ids, sampling) in submitted.items():
        seen = harness.seen[req_id]
        assert seen.output_ids == expected_ids(prompt_ids, sampling, harness.limits.eos_token_ids), req_id
        assert seen.error is None


def serve(harness: Harness, requests: list[tuple[list[int], SamplingParams]]) -> None:
    submitted = dict(enumerate(requests))
    for req_id, (prompt_ids, sampling) in submitted.items():
        harness.submit(req_id, prompt_ids, sampling)
    harness.run()
    check_all(harness, submitted)


def test_a_crowd_gets_what_each_would_get_alone() -> None:
    sizes = [(3, 40), (70, 5), (16, 16), (17, 1), (1, 60), (100, 30), (5, 5), (33, 2), (8, 90), (2, 1), (120, 30)]
    requests = [(prompt_of(size, seed), SamplingParams(new)) for seed, (size, new) in enumerate(sizes)]
    serve(Harness(), requests)


@pytest.mark.parametrize("chunk", [1, 7, 16, 36, 37, 64])
def test_chunked_prefill_gives_the_same_ids(chunk: int) -> None:
    harness = Harness(chunked_prefill_size=chunk, batch_max_tokens=chunk + 8)
    serve(harness, [(prompt_of(37), SamplingParams(10)), (prompt_of(2, 5), SamplingParams(30))])


def test_a_request_gains_a_token_only_in_a_step_that_ran_it() -> None:
    harness = Harness(chunked_prefill_size=4, batch_max_tokens=12, has_prefix_cache=False)
    requests = [(prompt_of(2, seed), SamplingParams(20)) for seed in range(5)] + [(prompt_of(60), SamplingParams(5))]
    serve(harness, requests)
    num_sampled = sum(len(seen.output_ids) for seen in harness.seen.values())
    wasted = harness.worker.num_rows - sum(len(ids) for ids, _ in requests) - (num_sampled - len(requests))
    ended_by_eos = sum(seen.finish == FinishCode.STOP for seen in harness.seen.values())
    assert 0 <= wasted <= ended_by_eos


def test_decode_rows_are_never_held_up_by_a_long_prompt() -> None:
    harness = Harness(chunked_prefill_size=8, batch_max_tokens=16)
    harness.submit(1, prompt_of(3), SamplingParams(60, ignore_eos=True))
    harness.turn()
    harness.submit(2, prompt_of(120), SamplingParams(3))
    harness.run()
    mixed = [plan for plan in harness.worker.plans if plan.prefill_rows][1:]
    assert len(mixed) == 15
    assert all(len(unpack_int32(plan.decode_rows)) == 1 for plan in mixed)


def test_two_runs_plan_the_same_steps() -> None:
    plans = []
    for _ in range(2):
        harness = Harness()
        serve(harness, [(prompt_of(5 + 9 * seed % 40, seed), SamplingParams(20)) for seed in range(30)])
        plans.append(harness.worker.plans)
    assert plans[0] == plans[1]


def test_an_end_by_length_wastes_no_row() -> None:
    harness = Harness()
    serve(harness, [(prompt_of(5), SamplingParams(9, ignore_eos=True))])
    assert harness.worker.num_rows == 5 + 8
    assert harness.seen[0].finish == FinishCode.LENGTH


def test_an_end_of_sequence_wastes_one_row_and_its_result_is_ignored() -> None:
    harness = Harness()
    prompt_ids = prompt_that_ends_by_eos(after=4)
    serve(harness, [(prompt_ids, SamplingParams(50))])
    assert harness.worker.num_rows == len(prompt_ids) + 3 + 1
    assert harness.seen[0].finish == FinishCode.STOP


def test_an_end_of_sequence_as_the_last_token_is_a_stop() -> None:
    harness = Harness()
    serve(harness, [(prompt_that_ends_by_eos(after=3), SamplingParams(3))])
    assert harness.seen[0].finish == FinishCode.STOP
    assert len(harness.seen[0].output_ids) == 3


def test_every_end_of_sequence_id_ends_and_ignore_eos_ignores_them_all() -> None:
    harness = Harness(eos_token_ids=(7, 9, 11))
    requests = [(prompt_of(3, seed), SamplingParams(40, ignore_eos=seed % 2 == 0)) for seed in range(20)]
    serve(harness, requests)
    for req_id, (_, sampling) in enumerate(requests):
        ended = harness.seen[req_id].output_ids[-1] in (7, 9, 11)
        assert harness.seen[req_id].finish == (
            FinishCode.LENGTH if sampling.ignore_eos or not ended else FinishCode.STOP
        )
        assert not sampling.ignore_eos or len(harness.seen[req_id].output_ids) == 40


def test_the_clients_own_stop_ids_stop_also_where_eos_is_ignored() -> None:
    harness = Harness()
    stop_id = expected_ids(prompt_of(4), SamplingParams(10, ignore_eos=True))[5]
    serve(harness, [(prompt_of(4), SamplingParams(50, ignore_eos=True, stop_token_ids=(stop_id,)))])
    assert harness.seen[0].finish == FinishCode.STOP


def test_a_model_without_an_end_of_sequence_id_ends_by_length() -> None:
    harness = Harness(eos_token_ids=())
    serve(harness, [(prompt_of(4), SamplingParams(50))])
    assert harness.seen[0].finish == FinishCode.LENGTH


def test_not_finite_logits_end_only_that_request_with_an_error() -> None:
    harness = Harness()
    for req_id in range(3):
        harness.submit(req_id, prompt_of(4, req_id), SamplingParams(20, ignore_eos=True))
    for _ in range(5):
        harness.turn()
    harness.worker.failing_rows.add(1)
    harness.run()
    errors = [harness.seen[req_id].error for req_id in range(3)]
    assert [error is not None and error.status for error in errors] == [False, 500, False]
    for req_id in (0, 2):
        assert harness.seen[req_id].output_ids == expected_ids(
            prompt_of(4, req_id), SamplingParams(20, ignore_eos=True)
        )
    assert harness.loads[-1].used_slots == 0


@pytest.mark.parametrize(
    ("prompt_len", "max_new_tokens", "limit"),
    [
        (149, 2, "max_req_total_len (150)"),
        (500, 1, "max_req_total_len (150)"),
        (10, 2**31 - 1, "max_req_total_len (150)"),
        (10, 10**18, "max_req_total_len (150)"),
        (100, 42, "max_total_token_num (140)"),
    ],
)
def test_what_can_never_fit_is_refused_naming_the_limit(prompt_len: int, max_new_tokens: int, limit: str) -> None:
    harness = Harness(max_total_token_num=140)
    harness.submit(1, prompt_of(prompt_len), SamplingParams(max_new_tokens))
    harness.submit(2, prompt_of(10), SamplingParams(3))
    harness.run()
    error = harness.seen[1].error
    assert error is not None
    assert error.status == 400
    assert limit in error.message
    assert harness.seen[2].output_ids == expected_ids(prompt_of(10), SamplingParams(3), EOS_IDS)


def test_what_just_fits_is_served() -> None:
    serve(Harness(max_total_token_num=140), [(prompt_of(100), SamplingParams(41, ignore_eos=True))])
    serve(Harness(), [(prompt_of(149), SamplingParams(1))])


def test_a_full_queue_answers_429_and_the_others_are_served() -> None:
    harness = Harness(max_queued_reqs=3)
    for req_id in range(5):
        harness.submit(req_id, prompt_of(4, req_id), SamplingParams(3))
    harness.run()
    assert [seen.error.status if seen.error else 0 for _, seen in sorted(harness.seen.items())] == [0, 0, 0, 429, 429]


def test_an_id_in_use_is_an_invariant_broken() -> None:
    harness = Harness()
    message = GenerateMsg(5, pack_int32([1, 2]), SamplingParams(3), TextParams())
    harness.scheduler.add(message)
    with pytest.raises(InvariantError, match="in use"):
        harness.scheduler.add(message)


@pytest.mark.parametrize("turns", [0, 1, 2, 3, 4, 6, 12, 13, 14])
def test_an_abort_frees_everything_at_once_in_every_state(turns: int) -> None:
    harness = Harness(chunked_prefill_size=16, batch_max_tokens=24)
    harness.submit(1, prompt_of(60), SamplingParams(10, ignore_eos=True))
    for _ in range(turns):
        harness.turn()
    harness.inbox.messages.append(AbortMsg([1, 999]))
    harness.turn()
    assert is_idle(harness.loads[-1])
    ended_before = turns > 13
    assert harness.seen[1].finish == (FinishCode.LENGTH if ended_before else FinishCode.ABORT)
    harness.run()
    serve_again = expected_ids(prompt_of(9), SamplingParams(5), EOS_IDS)
    harness.submit(2, prompt_of(9), SamplingParams(5))
    harness.run()
    assert harness.seen[2].output_ids == serve_again


def test_no_step_runs_an_aborted_request() -> None:
    harness = Harness()
    harness.submit(1, prompt_of(5), SamplingParams(100, ignore_eos=True))
    for _ in range(6):
        harness.turn()
    rows_before = harness.worker.num_rows
    harness.inbox.messages.append(AbortMsg([1]))
    harness.run()
    assert harness.worker.num_rows == rows_before


def test_a_waiting_request_is_aborted_without_disturbing_the_running_ones() -> None:
    harness = Harness(running_max_req_size=1)
    for req_id in range(3):
        harness.submit(req_id, prompt_of(5, req_id), SamplingParams(10))
    harness.turn()
    harness.inbox.messages.append(AbortMsg([1]))
    harness.run()
    assert harness.seen[1].finish == FinishCode.ABORT
    check_all(harness, {req_id: (prompt_of(5, req_id), SamplingParams(10)) for req_id in (0, 2)})


def test_a_stop_from_the_detokenizer_ends_quietly() -> None:
    harness = Harness()
    harness.submit(1, prompt_of(5), SamplingParams(100, ignore_eos=True))
    for _ in range(6):
        harness.turn()
    num_ids = len(harness.seen[1].output_ids)
    harness.inbox.messages.append(StopMsg([1, 999]))
    harness.run()
    assert harness.seen[1].finish == FinishCode.NONE
    assert len(harness.seen[1].output_ids) == num_ids
    assert harness.loads[-1].num_running == 0


def test_a_big_head_is_passed_but_not_starved() -> None:
    harness = Harness(max_total_token_num=1000, max_req_total_len=1000, chunked_prefill_size=400, batch_max_tokens=500)
    harness.submit(0, prompt_of(300), SamplingParams(200, ignore_eos=True))
    harness.turn()
    harness.submit(1, prompt_of(700, 1), SamplingParams(10, ignore_eos=True))
    next_id = 2
    while not harness.seen.get(1) or not harness.seen[1].output_ids:
        assert next_id < 700, "the big one starves"
        harness.submit(next_id, prompt_of(20, next_id), SamplingParams(20, ignore_eos=True))
        next_id += 1
        harness.turn()
    assert len(harness.finished) > 10, "the small ones made no progress"
    harness.run()
    assert all(seen.has_ended for seen in harness.seen.values())


def test_the_rows_bound_the_batch() -> None:
    harness = Harness(running_max_req_size=2, max_total_token_num=1000)
    serve(harness, [(prompt_of(4, seed), SamplingParams(10)) for seed in range(9)])
    assert max(load.num_running for load in harness.loads) == 2


def test_results_out_of_order_are_refused() -> None:
    harness = Harness()
    harness.scheduler.add(GenerateMsg(5, pack_int32([1, 2]), SamplingParams(3), TextParams()))
    harness.scheduler.plan()
    with pytest.raises(InvariantError, match="the result is of step 9"):
        harness.scheduler.apply(StepResult(9, pack_int32([1]), pack_float32([0.0])))


def test_a_higher_priority_goes_first_and_the_lower_is_not_starved() -> None:
    harness = Harness(running_max_req_size=1, max_req_total_len=50)
    harness.submit(0, prompt_of(4), SamplingParams(2))
    harness.turn()
    harness.submit(1, prompt_of(4, 1), SamplingParams(2, ignore_eos=True))
    for req_id in range(2, 100):
        harness.submit(req_id, prompt_of(4, req_id), SamplingParams(2, ignore_eos=True), priority=1)
    harness.run()
    assert harness.finished[1] == 2
    place = harness.finished.index(1)
    assert 10 < place < 98


def test_an_overdue_request_fails_wherever_it_is() -> None:
    harness = Harness(running_max_req_size=1)
    harness.submit(1, prompt_of(4), SamplingParams(100, ignore_eos=True), timeout_s=20.0)
    harness.submit(2, prompt_of(4, 1), SamplingParams(100, ignore_eos=True), timeout_s=10.0)
    harness.submit(3, prompt_of(4, 2), SamplingParams(10, ignore_eos=True))
    harness.run()
    errors = [harness.seen[req_id].error for req_id in (1, 2)]
    assert [error and error.status for error in errors] == [504, 504]
    assert 10 < len(harness.seen[1].output_ids) <= 20
    assert not harness.seen[2].output_ids
    assert len(harness.seen[3].output_ids) == 10
    assert is_idle(harness.loads[-1])


def test_a_target_for_inter_token_latency_sizes_the_chunks() -> None:
    harness = Harness(chunked_prefill_size=64, batch_max_tokens=80, max_itl_s=0.05, max_total_token_num=2000)
    harness.seconds_per_step = lambda plan: 0.01 + 0.001 * sum(unpack_int32(plan.prefill_lens).tolist())
    harness.submit(0, prompt_of(4), SamplingParams(120, ignore_eos=True))
    for req_id in range(1, 20):
        harness.submit(req_id, prompt_of(100, req_id), SamplingParams(1))
    harness.run()
    lens = [sum(unpack_int32(plan.prefill_lens).tolist()) for plan in harness.worker.plans if plan.decode_rows]
    late = [length for length in lens[20:] if length]
    assert late
    assert all(30 <= length <= 42 for length in late[:-1])


def turns_of(harness: Harness, requests: list[tuple[list[int], SamplingParams]]) -> int:
    start = harness.now
    first = len(harness.seen)
    for req_id, (prompt_ids, sampling) in enumerate(requests, start=first):
        harness.submit(req_id, prompt_ids, sampling)
    harness.run()
    check_all(harness, dict(enumerate(requests, start=first)))
    return int(harness.now - start)


def test_cold_warm_off_and_shared_while_it_runs_the_text_is_the_same() -> None:
    head = prompt_of(60)
    requests = [(head + prompt_of(5, seed), SamplingParams(12)) for seed in range(12)]
    off = Harness(has_prefix_cache=False, max_total_token_num=1000)
    turns_of(off, requests)
    on = Harness(max_total_token_num=1000)
    cold = turns_of(on, requests)
    warm = turns_of(on, requests)
    assert warm <= cold
    assert on.worker.num_rows < off.worker.num_rows
    assert all(on.seen[req_id].cached_len == 64 for req_id in range(12, 24))


def test_a_prompt_is_shared_while_the_first_request_still_prefills_or_decodes() -> None:
    harness = Harness()
    harness.submit(0, prompt_of(70), SamplingParams(30, ignore_eos=True))
    for _ in range(6):
        harness.turn()
    harness.submit(1, prompt_of(70), SamplingParams(30, ignore_eos=True))
    harness.run()
    assert harness.seen[1].cached_len == 69
    assert harness.seen[0].cached_len == 0
    assert harness.seen[1].output_ids == harness.seen[0].output_ids


def test_twins_in_one_step_share_by_waiting_for_the_next() -> None:
    harness = Harness(chunked_prefill_size=200, batch_max_tokens=220)
    serve(harness, [(prompt_of(100), SamplingParams(3))] * 3)
    assert [harness.seen[req_id].cached_len for req_id in range(3)] == [0, 99, 99]


def test_an_answer_is_cached_for_the_next_turn_of_the_chat() -> None:
    harness = Harness()
    prompt_ids, sampling = prompt_of(20), SamplingParams(30, ignore_eos=True)
    turns_of(harness, [(prompt_ids, sampling)])
    again = prompt_ids + expected_ids(prompt_ids, sampling) + [1, 2, 3]
    turns_of(harness, [(again, SamplingParams(3))])
    assert harness.seen[1].cached_len == 20 + 30 - 2  # the last token has no K and V, and the one before is not kept


def test_the_cache_gives_way_to_requests() -> None:
    harness = Harness()
    for seed in range(20):
        turns_of(harness, [(prompt_of(90, seed), SamplingParams(40))])
    assert 0 < harness.loads[-1].cached_slots <= 200


def test_salts_keep_prompts_apart() -> None:
    harness = Harness()
    for req_id, salt in enumerate(["a", "b", "a"]):
        harness.submit(req_id, prompt_of(50), SamplingParams(5), cache_salt=salt)
        harness.run()
    assert [harness.seen[req_id].cached_len for req_id in range(3)] == [0, 0, 49]


@pytest.mark.parametrize("max_new_tokens", [1, 20])
def test_what_a_failed_request_has_written_is_never_read_again(max_new_tokens: int) -> None:
    harness = Harness()
    harness.worker.failing_rows.add(0)
    harness.submit(0, prompt_of(10), SamplingParams(max_new_tokens))
    harness.run()
    assert harness.seen[0].error is not None
    assert is_idle(harness.loads[-1])
    assert harness.loads[-1].cached_slots == 0
    harness.submit(1, prompt_of(10), SamplingParams(5))
    harness.run()
    assert harness.seen[1].cached_len == 0


def test_a_failed_request_leaves_the_prefix_that_it_had_found() -> None:
    harness = Harness()
    turns_of(harness, [(prompt_of(30), SamplingParams(2))])
    harness.worker.failing_rows.add(0)
    harness.submit(1, [*prompt_of(30), 1, 2, 3], SamplingParams(5))
    harness.run()
    assert harness.seen[1].error is not None
    turns_of(harness, [([*prompt_of(30), 1, 2, 3], SamplingParams(5))])
    assert harness.seen[2].cached_len == 30


@dataclass
class Client:
    prompt_ids: list[int]
    sampling: SamplingParams
    leaves_after: int | None


clients = st.builds(
    Client,
    prompt_ids=st.one_of(
        st.lists(st.integers(0, 49), min_size=1, max_size=60),
        st.builds(
            lambda length, tail: prompt_of(length) + tail, st.integers(1, 50), st.lists(st.integers(0, 1), max_size=9)
        ),
    ),
    sampling=st.builds(
        SamplingParams,
        max_new_tokens=st.integers(1, 60),
        ignore_eos=st.booleans(),
        stop_token_ids=st.sampled_from([(), (), (3, 4)]),
    ),
    leaves_after=st.one_of(st.none(), st.none(), st.integers(0, 30)),
)


@settings(max_examples=100)
@given(
    arrivals=st.lists(st.tuples(st.integers(0, 6), clients), max_size=25),
    pool=st.integers(119, 300),
    rows=st.integers(1, 8),
    chunk=st.integers(1, 40),
    spare=st.integers(1, 40),
)
def test_whatever_comes_everybody_is_answered_rightly_and_nothing_is_left(
    arrivals: list[tuple[int, Client]], pool: int, rows: int, chunk: int, spare: int
) -> None:
    harness = Harness(
        max_total_token_num=pool, running_max_req_size=rows, chunked_prefill_size=chunk, batch_max_tokens=rows + spare
    )
    leaving: list[tuple[int, int]] = []
    now = 0
    for req_id, (pause, client) in enumerate(arrivals):
        for _ in range(pause):
            harness.inbox.messages.extend(AbortMsg([other]) for due, other in leaving if due == now)
            if not harness.scheduler.is_idle or harness.inbox.messages:
                harness.turn()
            now += 1
        harness.submit(req_id, client.prompt_ids, client.sampling)
        if client.leaves_after is not None:
            leaving.append((now + client.leaves_after, req_id))
    harness.run()
    for req_id, (_, client) in enumerate(arrivals):
        seen = harness.seen[req_id]
        expected = expected_ids(client.prompt_ids, client.sampling, EOS_IDS)
        if seen.finish == FinishCode.ABORT:
            assert client.leaves_after is not None
            assert seen.output_ids == expected[: len(seen.output_ids)]
        else:
            assert seen.output_ids == expected
    if harness.loads:
        assert is_idle(harness.loads[-1])
