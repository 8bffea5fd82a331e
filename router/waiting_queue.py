"""Requests that have not been admitted yet."""

from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from lightserve.router.request import Req


class WaitingQueue:
    """A bounded queue in order of arrival, which small requests may leave past a head that does not fit.

    So that nobody starves, the head may be passed ``max_passes`` times; then all wait for it.

    Args:
        max_reqs: Requests that may wait.
        max_passes: How often the oldest request may be passed.
        lookahead: Requests that are considered at once.
    """

    def __init__(self, max_reqs: int, *, max_passes: int, lookahead: int) -> None:
        self._max_reqs = max_reqs
        self._max_passes = max_passes
        self._lookahead = lookahead
        self._reqs: OrderedDict[int, Req] = OrderedDict()  # by req_id; unlike a dict, takes from its head in O(1)
        self._head_passes = 0
        self.max_slots = 0

    def __len__(self) -> int:
        return len(self._reqs)

    @property
    def is_full(self) -> bool:
        """Whether another request would be one too many."""
        return len(self._reqs) >= self._max_reqs

    def add(self, req: Req) -> None:
        """Append a request."""
        self._reqs[req.req_id] = req
        self.max_slots += req.max_slots

    def remove(self, req: Req) -> None:
        """Take out a request that will not be admitted."""
        if self._is_head(req):
            self._head_passes = 0
        del self._reqs[req.req_id]
        self.max_slots -= req.max_slots

    def admit(self, req: Req) -> None:
        """Take out a request that joins the batch, and count whom it passes."""
        if not self._is_head(req):
            self._head_passes += 1
        self.remove(req)

    def candidates(self) -> Iterator[Req]:
        """Yield the requests that may be admitted now, in the order in which they should be tried."""
        return islice(self._reqs.values(), self._lookahead if self._head_passes < self._max_passes else 1)

    def _is_head(self, req: Req) -> bool:
        return next(iter(self._reqs.values())) is req
