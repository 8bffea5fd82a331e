import re

from hypothesis import given
from hypothesis import strategies as st

from lightserve.http_server.mark_guard import pattern_of_longest

WORDS = st.lists(st.text("ab|<.", min_size=1, max_size=4), min_size=1, max_size=6)


@given(words=WORDS, text=st.text("ab|<.", max_size=20))
def test_the_pattern_finds_what_one_alternative_per_word_finds(words: list[str], text: str) -> None:
    longest_first = "|".join(map(re.escape, sorted(words, key=len, reverse=True)))
    assert re.findall(pattern_of_longest(words), text) == re.findall(longest_first, text)
