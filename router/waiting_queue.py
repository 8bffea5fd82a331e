"""Requests that have not been admitted yet."""

import heapq
from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain, islice

from lightserve.router.request import Req


class WaitingQueue:
    """A bounded queue by priority and arrival, which small requests may leave past one that does not fit.

    So that nobody starves, the request that came first may be passed ``max_passes`` times, by whomever; then all wait
    for it.

    Args:
        max_reqs: Requests that may wait. Paused ones come back all the same.
        max_passes: How often the oldest request may be passed.
        lookahead: Requests that are considered at once.
    """

    def __init__(self, max_reqs: int, *, max_passes: int, lookahead: int) -> None:
        self._max_reqs = max_reqs
        self._max_passes = max_passes
        self._lookahead = lookahead
        self._reqs: dict[int, Req] = {}
        # By priority, highest first, then by req_id. An OrderedDict, unlike a dict, takes from its head in O(1).
        self._levels: dict[int, OrderedDict[int, Req]] = {}
        self._arrivals: list[tuple[int, int]] = []  # heap of (arrival, req_id); some have left
        self._passes = 0
        self.max_slots = 0

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def is_full(self) -> bool:
        """Whether another request would be one too many."""
        return len(self._reqs) >= self._max_reqs

    def add(self, req: Req) -> None:
        """Append a request."""
        self._level_of(req)[req.req_id] = req
        self._reqs[req.req_id] = req
        heapq.heappush(self._arrivals, (req.arrival, req.req_id))
        self.max_slots += req.max_slots

    def put_back(self, req: Req) -> None:
        """Add a paused request at the head of its priority."""
        self.add(req)
        self._level_of(req).move_to_end(req.req_id, last=False)

    def remove(self, req: Req) -> None:
        """Take out a request that will not be admitted."""
        if req is self._oldest():
            self._passes = 0
        del self._reqs[req.req_id]
        level = self._levels[req.priority]
        del level[req.req_id]
        if not level:
            del self._levels[req.priority]
        self.max_slots -= req.max_slots

    def admit(self, req: Req) -> None:
        """Take out a request that joins the batch, and count whom it passes."""
        if req is not self._oldest():
            self._passes += 1
        self.remove(req)

    def candidates(self) -> Iterator[Req]:
        """Yield the requests that may be admitted now, in the order in which they should be tried."""
        if self._passes >= self._max_passes:
            return iter((self._oldest(),))
        return islice(chain.from_iterable(level.values() for level in self._levels.values()), self._lookahead)

    def _oldest(self) -> Req:
        while self._arrivals[0][1] not in self._reqs:
            heapq.heappop(self._arrivals)
        return self._reqs[self._arrivals[0][1]]

    def _level_of(self, req: Req) -> OrderedDict[int, Req]:
        if req.priority not in self._levels:
            self._levels[req.priority] = OrderedDict()
            self._levels = dict(sorted(self._levels.items(), reverse=True))
        return self._levels[req.priority]
