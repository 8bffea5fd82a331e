"""When requests that have a time limit must have ended."""

import heapq


class Deadlines:
    """Times by request; a heap, whose entries of requests that have ended are dropped as they come up or grow many."""

    def __init__(self) -> None:
        self._at_s: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def add(self, req_id: int, at_s: float) -> None:
        """Note a request's deadline."""
        self._at_s[req_id] = at_s
        heapq.heappush(self._heap, (at_s, req_id))
        if len(self._heap) > 64 + 2 * len(self._at_s):
            self._heap = [(time_s, req_id) for req_id, time_s in self._at_s.items()]
            heapq.heapify(self._heap)

    def remove(self, req_id: int) -> None:
        """Forget a request, whether it had a deadline or not."""
        self._at_s.pop(req_id, None)

    def overdue(self, now_s: float) -> list[int]:
        """Tell whose deadlines have passed, earliest first, and forget those."""
        req_ids = []
        while self._heap and self._heap[0][0] <= now_s:
            _, req_id = heapq.heappop(self._heap)
            if self._at_s.pop(req_id, None) is not None:
                req_ids.append(req_id)
        return req_ids
