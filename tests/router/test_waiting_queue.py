import numpy as np

from lightserve.router.request import Req
from lightserve.router.waiting_queue import WaitingQueue
from lightserve.sampling_params import SamplingParams


def make_req(req_id: int, priority: int = 0) -> Req:
    return Req(req_id, req_id, np.arange(3, dtype=np.int32), 3, SamplingParams(max_new_tokens=5), priority)


def make_queue(num_reqs: int) -> tuple[WaitingQueue, list[Req]]:
    queue = WaitingQueue(100, max_passes=3, lookahead=4)
    reqs = [make_req(req_id) for req_id in range(num_reqs)]
    for req in reqs:
        queue.add(req)
    return queue, reqs


def test_candidates_come_in_order_of_arrival_as_far_as_the_lookahead() -> None:
    queue, reqs = make_queue(6)
    assert list(queue.candidates()) == reqs[:4]


def test_after_so_many_passes_only_the_head_is_a_candidate() -> None:
    queue, reqs = make_queue(8)
    for passing in reqs[1:4]:
        assert len(list(queue.candidates())) > 1
        queue.admit(passing)
    assert list(queue.candidates()) == [reqs[0]]


def test_a_new_head_may_be_passed_afresh() -> None:
    queue, reqs = make_queue(8)
    for passing in reqs[1:4]:
        queue.admit(passing)
    queue.admit(reqs[0])
    assert list(queue.candidates()) == reqs[4:8]


def test_a_head_that_leaves_unadmitted_frees_the_way() -> None:
    queue, reqs = make_queue(8)
    for passing in reqs[1:4]:
        queue.admit(passing)
    queue.remove(reqs[0])
    assert list(queue.candidates()) == reqs[4:8]


def test_the_queue_knows_when_it_is_full_and_what_it_asks_for() -> None:
    queue = WaitingQueue(2, max_passes=3, lookahead=4)
    queue.add(make_req(1))
    assert not queue.is_full
    queue.add(make_req(2))
    assert queue.is_full
    assert queue.max_slots == 2 * 7
