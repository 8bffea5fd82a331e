"""Stop strings in a stream of text pieces, wherever the pieces are cut.

An Aho–Corasick automaton: its state after some text is the longest end of that text that begins a stop string. Exactly
so much is held back, and each character costs one look-up however many stop strings there are. Of several matches the
one that ends first counts, and of those the longest: so where the pieces are cut never changes the result.
Aho, Corasick: Efficient string matching, CACM 18(6), 1975.
"""

from collections import deque
from collections.abc import Iterable


class StopStrings:
    """A set of stop strings. Never changed once made; many matchers may share it.

    Args:
        strings: At least one, none empty.

    Raises:
        ValueError: One is empty.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        # State 0 is the empty prefix; each other state is one prefix of a stop string.
        self.next_states: list[dict[str, int]] = [{}]
        self.depths = [0]  # length of the prefix
        self.match_lens = [0]  # length of the longest stop string that ends here, 0: none
        for string in strings:
            if not string:
                raise ValueError("a stop string is empty")
            self._insert(string)
        self.first_chars = self.next_states[0].keys()
        self._link()

    def _insert(self, string: str) -> None:
        state = 0
        for char in string:
            if char not in self.next_states[state]:
                self.next_states[state][char] = len(self.next_states)
                self.next_states.append({})
                self.depths.append(self.depths[state] + 1)
                self.match_lens.append(0)
            state = self.next_states[state][char]
        self.match_lens[state] = len(string)

    def _link(self) -> None:
        """Give each state its fallback, the longest other prefix that ends like it, shorter prefixes first."""
        self.fallbacks = [0] * len(self.depths)
        queue = deque(self.next_states[0].values())
        while queue:
            state = queue.popleft()
            fallback = self.fallbacks[state]
            self.match_lens[state] = self.match_lens[state] or self.match_lens[fallback]
            for char, child in self.next_states[state].items():
                self.fallbacks[child] = self.step(fallback, char)
                queue.append(child)

    def step(self, state: int, char: str) -> int:
        """Return the state after one more character."""
        while state and char not in self.next_states[state]:
            state = self.fallbacks[state]
        return self.next_states[state].get(char, 0)


class StopMatcher:
    """Looks for stop strings in one answer.

    Attributes:
        matched: A stop string was seen; the text is over.
    """

    __slots__ = ("_held", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings) -> None:
        self.matched = False
        self._stops = stops
        self._state = 0
        self._held = ""  # the last depths[_state] characters: they may begin a stop string

    def feed(self, text: str) -> str:
        """Return the text that is certainly before any stop string."""
        stops, state = self._stops, self._state
        if not state and stops.first_chars.isdisjoint(text):
            return text
        for end, char in enumerate(text, len(self._held) + 1):
            state = stops.step(state, char)
            if stops.match_lens[state]:
                self.matched = True
                text, self._held = self._held + text, ""
                return text[: end - stops.match_lens[state]]
        self._state = state
        text = self._held + text
        shown = len(text) - stops.depths[state]
        self._held = text[shown:]
        return text[:shown]

    def finish(self) -> str:
        """Return what was held back, when nothing more comes."""
        text, self._held, self._state = self._held, "", 0
        return text
