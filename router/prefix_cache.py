"""Keys and values kept for prompts that begin alike: a radix tree over token ids, at token granularity."""

import heapq
from collections import Counter

import numpy as np

from lightserve.errors import InvariantError
from lightserve.router.admission import Admission
from lightserve.router.arrays import IdArray, SlotArray
from lightserve.router.prefix_tree import NOTHING, Match, Node
from lightserve.router.slots import SlotAllocator

_RESERVE = 32  # the share of the pool, as 1 / n, that is freed at once


class PrefixCache:
    """The trees, one for each salt, and the slots that they own.

    A running request locks the nodes from a root to its own; a node with sharers or children stays. The least recently
    used leaves go first, token by token from their ends. Sequences are compared by their ids, never by a hash of them.

    Args:
        slots: Whose slots the cache holds.
        admission: Told who shares what.
        is_enabled: If not, nothing is ever kept or found.
    """

    def __init__(self, slots: SlotAllocator, admission: Admission, *, is_enabled: bool = True) -> None:
        self._slots = slots
        self._admission = admission
        self._is_enabled = is_enabled
        self._roots: dict[str, Node] = {}
        self._clock = 0
        self._num_nodes = 0
        self._leaves: list[tuple[int, int, Node]] = []  # heap by last use; an entry may be out of date
        self._num_noted = 0
        self.num_unlocked = 0  # slots of nodes without sharers: free on demand

    @property
    def num_available(self) -> int:
        """Slots that are free, or will be when they are needed."""
        return self._slots.num_free + self.num_unlocked

    def match(self, ids: IdArray, salt: str, step: int) -> Match:
        """Find the longest cached prefix of a sequence that leaves it at least one id to run.

        Args:
            ids: [num_ids] int32.
            salt: Only what was inserted under the same salt is found.
            step: The step that is being planned: what it writes itself it cannot read.
        """
        node = branch_off = self._root(salt)
        branch = None
        length = pending = 0
        limit = len(ids) - 1
        while pending < limit:
            child = node.children.get(int(ids[pending]))
            if child is None:
                break
            common = _common_prefix(child.ids, ids[pending:limit])
            pending += common
            is_whole = common == len(child.ids)
            if child.step < step and length == node.end:
                length = pending
                branch_off, branch = (child, None) if is_whole else (node, child)
            if not is_whole:
                break
            node = child
        return Match(branch_off, branch, length, pending)

    def lock(self, match: Match, row: int) -> Node:
        """Let a request share what was matched.

        Returns:
            The request's node, which ends at ``match.length``.
        """
        node = match.node if match.branch is None else self._split(match.branch, match.length - match.node.end)
        path = list(node.path())
        lens: Counter[int] = Counter()  # by payer
        for part in path:
            lens[part.payer] += len(part.ids)
        payers = {payer: self._admission.join(payer, row, num_slots) for payer, num_slots in lens.items()}
        for part in path:
            if not part.sharers:
                self.num_unlocked -= len(part.ids)
            part.sharers.add(row)
            part.payer = payers[part.payer]
        root = node.root()
        root.sharers.add(row)
        self._roots.setdefault(root.salt, root)
        return node

    def unlock(self, node: Node, row: int) -> None:
        """End a request's share of a prefix. What it paid for, those who still share it pay for."""
        self._clock += 1
        for part in list(node.path()):
            part.sharers.remove(row)
            part.used_at = self._clock
            part.payer = self._admission.leave(part.payer, row, part.sharers, len(part.ids))
            if not part.sharers:
                self._leave_unlocked(part)
        root = node.root()
        root.sharers.remove(row)
        self._drop_if_unused(root)

    def settle(self, node: Node) -> None:
        """Decide anew who pays for a prefix, after a sharer's end has changed."""
        for part in node.path():
            part.payer = self._admission.settle(part.payer, part.sharers, len(part.ids))

    def _leave_unlocked(self, node: Node) -> None:
        if node.is_detached:
            self._slots.free(node.slots)
            self._num_nodes -= 1
        else:
            self.num_unlocked += len(node.ids)
            self._note_leaf(node)

    def grow(self, node: Node, ids: IdArray, slots: SlotArray, row: int, step: int) -> Node:
        """Take over a running request's next slots, so that others can share them while it runs.

        Args:
            node: The request's node.
            ids: [n] int32, the ids that follow it, at least one.
            slots: [n] int32, owned by the request and charged to it already.
            row: The request's row.
            step: The step that writes them.

        Returns:
            The request's new node. The old one if the cache has these ids in other slots, or may not keep them: then
            the slots stay the request's own.
        """
        if not self._is_enabled or node.is_detached or int(ids[0]) in node.children:
            return node
        child = self._add_child(node, ids, slots, step)
        child.sharers.add(row)
        child.payer = row
        return child

    def insert(self, node: Node, ids: IdArray, slots: SlotArray) -> None:
        """Keep what a request leaves behind its node. Slots of ids that the cache has already are freed.

        Args:
            node: The request's node, still locked.
            ids: [n] int32, the ids that follow it.
            slots: [n] int32, owned by the request; all written by steps that are over or run.
        """
        if not self._is_enabled or node.is_detached:
            self._slots.free(slots)
            return
        self._clock += 1
        while len(ids):
            child = node.children.get(int(ids[0]))
            if child is None:
                child = self._add_child(node, ids, slots, step=-1)
                child.used_at = self._clock
                self.num_unlocked += len(ids)
                self._note_leaf(child)
                return
            common = _common_prefix(child.ids, ids)
            self._slots.free(slots[:common])
            node = child if common == len(child.ids) else self._split(child, common)
            ids, slots = ids[common:], slots[common:]

    def discard(self, ids: IdArray, salt: str, length: int) -> None:
        """Let nobody share what follows a prefix's first ``length`` ids any more: who wrote it has failed."""
        node, at = self._root(salt), 0
        while at < len(ids):
            child = node.children.get(int(ids[at]))
            if child is None:
                return
            at += _common_prefix(child.ids, ids[at:])
            if at > length:
                self._cut_off(child, length)
                return
            if at < child.end:
                return
            node = child

    def _cut_off(self, node: Node, length: int) -> None:
        """Detach what of a node, and of all behind it, lies beyond its sequences' first ``length`` ids."""
        if node.start < length:
            self._split(node, length - node.start)
        parent = node.parent
        if parent is None:
            raise InvariantError("a root cannot be cut off")
        del parent.children[int(node.ids[0])]
        self._detach(node)
        self._note_leaf(parent)
        self._drop_if_unused(parent)

    def _detach(self, node: Node) -> None:
        node.is_detached = True
        for child in node.children.values():
            self._detach(child)
        if not node.sharers:
            self.num_unlocked -= len(node.ids)
            self._leave_unlocked(node)

    def make_room(self, num_tokens: int) -> None:
        """Evict until so many slots are free.

        Raises:
            InvariantError: Even without what is kept there are not enough.
        """
        missing = num_tokens - self._slots.num_free
        if missing <= 0:
            return
        if missing > self.num_unlocked:
            raise InvariantError(f"{missing} more slots are needed, {self.num_unlocked} are all that can be evicted")
        # Some more at once: with room after its last slot a request goes on there, which is cheapest.
        missing = min(max(missing, self._slots.num_slots // _RESERVE), self.num_unlocked)
        evicted: list[SlotArray] = []
        while missing:
            evicted.append(self._evict(missing))
            missing -= len(evicted[-1])
        self._slots.free(np.concatenate(evicted))

    def _evict(self, num_tokens: int) -> SlotArray:
        """Give up the last tokens of the least recently used leaf, ``num_tokens`` or all; return their slots."""
        leaf = self._oldest_leaf()
        kept = max(0, len(leaf.ids) - num_tokens)
        slots = leaf.slots[kept:]
        self.num_unlocked -= len(slots)
        if kept:
            leaf.end -= len(slots)
            leaf.ids, leaf.slots = leaf.ids[:kept], leaf.slots[:kept]
        else:
            self._remove(leaf)
        return slots

    def _oldest_leaf(self) -> Node:
        while self._leaves:
            used_at, _, leaf = self._leaves[0]
            if leaf.is_evictable and leaf.used_at == used_at:
                return leaf
            heapq.heappop(self._leaves)
        raise InvariantError(f"{self.num_unlocked} cached slots are in use by nobody, yet there is no leaf")

    def _note_leaf(self, node: Node) -> None:
        if not node.is_evictable:
            return
        self._num_noted += 1  # so that nodes are never compared
        heapq.heappush(self._leaves, (node.used_at, self._num_noted, node))
        if len(self._leaves) > 64 + 4 * self._num_nodes:
            self._leaves = [entry for entry in self._leaves if entry[2].is_evictable and entry[2].used_at == entry[0]]
            heapq.heapify(self._leaves)

    def _root(self, salt: str) -> Node:
        """Find a tree's root, or make one that is planted with its first sharer."""
        return self._roots.get(salt) or Node(None, salt, 0, NOTHING, NOTHING, step=-1)

    def _drop_if_unused(self, node: Node) -> None:
        if node.parent is None and not node.children and not node.sharers:
            self._roots.pop(node.salt, None)

    def _add_child(self, node: Node, ids: IdArray, slots: SlotArray, step: int) -> Node:
        child = Node(node, node.salt, node.end + len(ids), ids.copy(), slots.copy(), step)
        node.children[int(ids[0])] = child
        self._num_nodes += 1
        return child

    def _split(self, node: Node, length: int) -> Node:
        """Cut a node after its first ``length`` tokens, which become a new node before it."""
        parent = node.parent
        if parent is None:
            raise InvariantError("a root cannot be split")
        upper = Node(parent, node.salt, node.start + length, node.ids[:length], node.slots[:length], node.step)
        upper.sharers, upper.payer, upper.used_at = set(node.sharers), node.payer, node.used_at
        upper.children[int(node.ids[length])] = node
        parent.children[int(node.ids[0])] = upper
        node.parent, node.ids, node.slots = upper, node.ids[length:], node.slots[length:]
        self._num_nodes += 1
        return upper

    def _remove(self, leaf: Node) -> None:
        parent = leaf.parent
        if parent is None:
            raise InvariantError("a root was evicted")
        del parent.children[int(leaf.ids[0])]
        leaf.is_detached = True
        self._num_nodes -= 1
        self._note_leaf(parent)
        self._drop_if_unused(parent)


def _common_prefix(first: IdArray, second: IdArray) -> int:
    """Tell how many ids two sequences begin with alike."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    at = int(differs.argmax()) if length else 0
    return at if length and differs[at] else length
