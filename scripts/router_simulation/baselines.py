"""The admission policies of other routers, to compare with. They do not count what prompts share."""

from collections.abc import Callable, Iterable

from lightserve.router.admission import NOBODY, Admission, Claim


class ReserveAllAdmission(Admission):
    """Everybody reserves prompt and max_new_tokens from the first step to the last."""

    def __init__(self, max_total_token_num: int) -> None:
        super().__init__()
        self._max_total_token_num = max_total_token_num
        self._num_reserved = 0

    def fits(self, claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> bool:
        """Tell whether all that it may come to hold is unreserved."""
        needed = _at_its_end(claim) + sum(num_slots for payer, num_slots in shared if payer == NOBODY)
        return self._num_reserved + needed <= self._max_total_token_num

    def add(self, row: int, claim: Claim) -> None:
        """Reserve."""
        super().add(row, claim)
        self._num_reserved += _at_its_end(claim)

    def remove(self, row: int) -> None:
        """Give the reservation back."""
        self._num_reserved -= _at_its_end(self.claim_of(row))
        super().remove(row)

    def peak(self) -> int:
        """Tell what is reserved."""
        return self._num_reserved


class StaticAdmission(ReserveAllAdmission):
    """A batch is put together, runs until its last request has ended, and then makes way for the next."""

    def __init__(self, max_total_token_num: int) -> None:
        super().__init__(max_total_token_num)
        self._is_closed = False

    def fits(self, claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> bool:
        """Tell whether the batch is still being put together and has room."""
        self._is_closed = self._is_closed or not super().fits(claim, shared)
        return not self._is_closed

    def remove(self, row: int) -> None:
        """Open the next batch after the last request of this one."""
        super().remove(row)
        self._is_closed = bool(self._claims)


class AggressiveAdmission(Admission):
    """Whose prompt fits now may join, whatever comes; the router pauses the youngest when it must.

    Args:
        num_available: Tells how many slots are free or evictable.
        reserve: Slots to leave free.
    """

    def __init__(self, num_available: Callable[[], int], reserve: int) -> None:
        super().__init__()
        self._num_available = num_available
        self._reserve = reserve

    def fits(self, claim: Claim, shared: Iterable[tuple[int, int]] = ()) -> bool:
        """Tell whether the prompt's slots are there."""
        needed = claim.slots + sum(num_slots for payer, num_slots in shared if payer == NOBODY)
        return not self._claims or needed + self._reserve <= self._num_available()

    def peak(self) -> int:
        """Tell nothing: there is no promise."""
        return 0


def _at_its_end(claim: Claim) -> int:
    return claim.slots + claim.max_new_tokens - 1
