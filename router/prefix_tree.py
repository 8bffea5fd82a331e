"""The nodes of a radix tree over token ids, and what is found in it: stretches of sequences that begin alike."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from lightserve.router.admission import NOBODY
from lightserve.router.arrays import IdArray, SlotArray

NOTHING: SlotArray = np.zeros(0, dtype=np.int32)  # as ids, too


class Node:
    """A stretch ``[start, end)`` of sequences that agree up to ``end``; what follows differs, or is not known yet.

    Attributes:
        parent: The stretch before; None for a root, which is empty.
        salt: Its tree's.
        end: Where the stretch ends, counted from the begin of the sequence.
        ids: [end - start] int32.
        slots: [end - start] int32, where K and V of these tokens are; owned by the cache.
        step: The step that writes the slots; later ones may read them.
        children: By their first id.
        sharers: Rows of the requests that use the stretch. While there are any, it is locked.
        payer: Who is charged for the slots, see ``Admission.join``.
        used_at: When a sharer left last.
        is_detached: It hangs in no tree any more: nobody else may share it, and it ends with its last sharer.
    """

    __slots__ = (
        *("parent", "salt", "end", "ids", "slots", "step"),
        *("children", "sharers", "payer", "used_at", "is_detached"),
    )

    def __init__(self, parent: "Node | None", salt: str, end: int, ids: IdArray, slots: SlotArray, step: int) -> None:
        self.parent = parent
        self.salt = salt
        self.end = end
        self.ids = ids
        self.slots = slots
        self.step = step
        self.children: dict[int, Node] = {}
        self.sharers: set[int] = set()
        self.payer = NOBODY
        self.used_at = 0
        self.is_detached = False

    @property
    def start(self) -> int:
        """Where the stretch begins."""
        return self.end - len(self.ids)

    @property
    def is_evictable(self) -> bool:
        """Whether its last token may go."""
        return not (self.sharers or self.children or self.is_detached or self.parent is None)

    def path(self) -> Iterator["Node"]:
        """Yield this node and those before it; not the root."""
        node = self
        while node.parent is not None:
            yield node
            node = node.parent

    def root(self) -> "Node":
        """Tell the root of its tree."""
        node = self
        while node.parent is not None:
            node = node.parent
        return node

    def prefix_slots(self) -> SlotArray:
        """Tell where the whole sequence up to ``end`` lies: [end] int32."""
        return np.concatenate([NOTHING, *reversed([part.slots for part in self.path()])])


@dataclass(frozen=True, slots=True)
class Match:
    """The longest cached prefix of a sequence.

    Attributes:
        node: The last stretch that matches in whole.
        branch: The stretch after it, of which only a part matches.
        length: Tokens that match; the slots of all of them are written by earlier steps.
        pending: Tokens that will match in the next step, when this one has been launched; at least ``length``.
    """

    node: Node
    branch: Node | None
    length: int
    pending: int

    def shares(self) -> Iterator[tuple[int, int]]:
        """Yield (payer, number of slots) of each stretch; what nobody pays for is held by no running request."""
        if self.branch is not None:
            yield self.branch.payer, self.length - self.node.end
        for node in self.node.path():
            yield node.payer, len(node.ids)
