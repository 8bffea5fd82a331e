import pytest
from msgspec.structs import replace

from lightserve.ipc.messages import AbortMsg, LoadMsg, unpack_int32
from lightserve.sampling_params import SamplingParams
from tests.router.harness import Harness

IDLE = LoadMsg(0, 0, 0, 0, 0, 0, 200)


def test_an_idle_router_waits_for_a_message_and_a_busy_one_does_not() -> None:
    harness = Harness()
    harness.submit(1, [1, 2, 3], SamplingParams(5, ignore_eos=True))
    harness.run()
    assert harness.inbox.num_waits == 1
    harness.submit(2, [1, 2, 3], SamplingParams(5, ignore_eos=True))
    harness.run()
    assert harness.inbox.num_waits == 2


def test_the_last_result_is_fetched_without_another_step() -> None:
    harness = Harness()
    harness.submit(1, [1, 2, 3], SamplingParams(1))
    harness.turn()
    assert not harness.seen[1].output_ids
    harness.turn()
    assert len(harness.seen[1].output_ids) == 1
    assert len(harness.worker.plans) == 1


def test_a_request_that_comes_while_a_step_runs_is_in_the_next_one() -> None:
    harness = Harness()
    harness.submit(1, [1, 2, 3], SamplingParams(30, ignore_eos=True))
    for _ in range(4):
        harness.turn()
    harness.submit(2, [4, 5, 6], SamplingParams(30, ignore_eos=True), late=True)
    before = harness.now
    harness.turn()
    assert unpack_int32(harness.worker.plans[-1].prefill_rows).tolist() == [1]
    assert harness.now - before == pytest.approx(1.0)  # as long as the step that ran, no longer


def test_the_device_never_waits_for_a_plan() -> None:
    harness = Harness()
    harness.submit(1, [1, 2, 3], SamplingParams(30, ignore_eos=True))
    harness.run()
    assert harness.now == pytest.approx(30.0)


def test_the_load_goes_back_to_zero_when_all_clients_leave() -> None:
    harness = Harness(running_max_req_size=2)
    for req_id in range(50):
        harness.submit(req_id, [req_id, 2, 3], SamplingParams(40, ignore_eos=True))
    for _ in range(5):
        harness.turn()
    assert harness.loads[-1].num_running == 2
    assert harness.loads[-1].num_waiting == 48
    harness.inbox.messages.append(AbortMsg(list(range(50))))
    harness.turn()
    assert replace(harness.loads[-1], cached_slots=0) == IDLE


def test_the_load_is_sent_only_when_it_changed() -> None:
    harness = Harness()
    harness.inbox.messages.append(AbortMsg([5]))
    harness.turn()
    harness.inbox.messages.append(AbortMsg([6]))
    harness.turn()
    assert harness.loads == [IDLE]


def test_the_promise_counts_the_running_and_the_request_all() -> None:
    harness = Harness(running_max_req_size=1)
    for req_id in range(3):
        harness.submit(req_id, [req_id] * 10, SamplingParams(21, ignore_eos=True))
    harness.turn()
    assert harness.loads[-1].promised_slots == 30
    assert harness.loads[-1].requested_slots == 90
    assert harness.loads[-1].used_slots == 10
