from lightserve.router.deadlines import Deadlines


def test_requests_are_overdue_in_the_order_of_their_times_and_once() -> None:
    deadlines = Deadlines()
    for req_id, at_s in ((1, 5.0), (2, 3.0), (3, 9.0)):
        deadlines.add(req_id, at_s)
    assert deadlines.overdue(2.9) == []
    assert deadlines.overdue(5.0) == [2, 1]
    assert deadlines.overdue(5.0) == []


def test_who_has_ended_is_never_overdue() -> None:
    deadlines = Deadlines()
    deadlines.add(1, 5.0)
    deadlines.remove(1)
    deadlines.remove(2)
    assert deadlines.overdue(100.0) == []


def test_ended_requests_with_late_deadlines_take_no_memory() -> None:
    deadlines = Deadlines()
    for req_id in range(10_000):
        deadlines.add(req_id, 1e9 + req_id)
        deadlines.remove(req_id)
    assert len(deadlines._heap) <= 65
