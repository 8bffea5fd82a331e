"""What running requests hold: rows, slots, shares of the prefix cache and claims on the pool, all kept in step."""

from lightserve.router.admission import Admission, Claim
from lightserve.router.arrays import IdArray, SlotArray
from lightserve.router.batch import Batch
from lightserve.router.limits import Limits
from lightserve.router.planned_step import Chunk
from lightserve.router.prefix_cache import PrefixCache
from lightserve.router.prefix_tree import Match
from lightserve.router.request import Req
from lightserve.router.slots import SlotAllocator


class Holdings:
    """Everything that a request takes when it joins and as it grows, and gives back when it leaves.

    Args:
        limits: For the sizes of batch and pool.
        admission: Told who holds what.

    Attributes:
        batch: The running requests.
        admission: Decides who may join.
        slots: The pool.
        cache: What is kept of it for prompts that begin alike.
        released_rows: Rows given back, for the next plan to tell.
    """

    def __init__(self, limits: Limits, admission: Admission) -> None:
        self.batch = Batch(limits.running_max_req_size, limits.max_slots_per_req)
        self.admission = admission
        self.slots = SlotAllocator(limits.max_total_token_num)
        self.cache = PrefixCache(self.slots, admission, is_enabled=limits.has_prefix_cache)
        self.released_rows: list[int] = []

    @property
    def used_slots(self) -> int:
        """Slots that running requests hold."""
        return self.slots.num_used - self.cache.num_unlocked

    @property
    def holders(self) -> list[Req]:
        """The running requests that have steps to come."""
        return [req for req in self.batch.reqs if req is not None and req.node is not None]

    def admit(self, req: Req, claim: Claim, match: Match) -> SlotArray:
        """Give a request a row and its share of what the cache has of its prompt.

        Returns:
            [match.length] int32, the slots that it shares.
        """
        self.batch.add(req)
        self.admission.add(req.row, claim)
        req.node = self.cache.lock(match, req.row)
        req.matched_len = match.length
        if req.cached_len < 0:
            req.cached_len = match.length
        cached_slots = req.node.prefix_slots()
        if len(cached_slots):
            self.batch.extend_prompt(req, cached_slots)
        return cached_slots

    def change_claim(self, req: Req, claim: Claim) -> None:
        """Let a running request claim as many slots in other steps."""
        self.admission.change(req.row, claim)
        if req.node is not None:
            self.cache.settle(req.node)

    def extend_prompt(self, req: Req, chunk_len: int, step: int) -> Chunk:
        """Take slots for the next ids of a prompt, and let others share them from the next step on."""
        start = int(self.batch.seq_lens[req.row])
        self.cache.make_room(chunk_len)
        room = req.max_slots - start - chunk_len
        slots = self.slots.allocate(chunk_len, room, after=int(self.batch.last_slots[req.row]))
        chunk = Chunk(req, start, slots)
        self.batch.extend_prompt(req, slots)
        if req.node is not None and req.node.end == start:  # else what comes before it is the request's own
            req.node = self.cache.grow(req.node, chunk.ids, slots, req.row, step)
        return chunk

    def extend_decodes(self) -> SlotArray:
        """Take a slot for each row that decodes next: [num_decode] int32."""
        rows = self.batch.decode_rows
        self.cache.make_room(len(rows))
        slots = self.slots.extend(self.batch.last_slots[rows])
        self.batch.append(rows, slots)
        return slots

    def leave(self, req: Req, *, keeps: bool = True) -> None:
        """Take back all that a request holds; ``keeps`` as for ``give_back_slots``."""
        self.give_back_slots(req, keeps=keeps)
        self.released_rows.append(req.row)
        self.batch.remove(req)

    def give_back_slots(self, req: Req, *, keeps: bool = True) -> None:
        """Take back a request's slots, if it still holds them; no later step may be planned for it.

        The prefix cache gets what it has computed, if that is to be kept, but for its last token: whether that one's
        logits are finite is not known yet.
        """
        node = req.node
        if node is None:
            return
        own_slots = self.batch.own_slots(req, node.end)
        num_kept = max(0, len(own_slots) - 1) if keeps else 0
        self.admission.remove(req.row)
        if num_kept:
            ids = self.batch.ids_between(req, node.end, node.end + num_kept)
            self.cache.insert(node, ids, own_slots[:num_kept])
        self.slots.free(own_slots[num_kept:])
        self.cache.unlock(node, req.row)
        req.node = None

    def known_ids(self, req: Req) -> IdArray:
        """Copy a running request's ids as far as they are known; [num_known] int32."""
        num_known = max(len(req.ids), int(self.batch.seq_lens[req.row]))
        return self.batch.ids_between(req, 0, num_known).copy()
