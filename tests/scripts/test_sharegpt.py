import json
from pathlib import Path

import pytest
from benchmark.sharegpt import LengthFilter, load_sharegpt

_FAKE = Path(__file__).parents[1] / "data" / "sharegpt_fake.json"
_USUAL = LengthFilter(max_prompt_len=1024, max_total_len=2048, output_len=None)


class _Words:
    """Counts words."""

    def __init__(self) -> None:
        self.num_counted = 0

    def count(self, text: str) -> int:
        self.num_counted += 1
        return len(text.split())


def _write(path: Path, *conversations: object) -> Path:
    path.write_text(json.dumps(list(conversations)))
    return path


def _chat(*texts: object) -> dict[str, object]:
    return {"conversations": [{"from": "human", "value": text} for text in texts]}


def test_the_first_two_turns_make_prompt_and_length(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.json", _chat("how are you today", "very well and you yourself", "fine"))
    (prompt,), _ = load_sharegpt(path, 10, 0, _USUAL, _Words())
    assert (prompt.body, prompt.prompt_len, prompt.output_len) == ("how are you today", 4, 5)


def test_bad_conversations_are_skipped_and_counted(tmp_path: Path) -> None:
    long = "word " * 1100
    path = _write(
        tmp_path / "c.json",
        {"conversations": []},
        _chat("only one turn here"),
        {"id": "no conversations"},
        {"conversations": [{"from": "human"}, {"from": "gpt"}]},
        {"conversations": None},
        _chat("a question of five words", ""),
        _chat("  \n ", "an answer of five words"),
        _chat(None, "an answer of five words"),
        _chat(7, "an answer of five words"),
        None,
        "text",
        _chat("hi", "an answer of five words"),
        _chat("a question of five words", "too short"),
        _chat(long, "an answer of five words"),
        _chat("word " * 1000, long),
        _chat("a question of five words", "an answer of five words"),
    )
    prompts, skipped = load_sharegpt(path, 10, 0, _USUAL, _Words())
    assert len(prompts) == 1
    assert skipped == {
        "fewer than two turns": 2,
        "malformed": 7,
        "empty text": 2,
        "prompt or answer too short": 2,
        "prompt too long": 1,
        "prompt and answer too long": 1,
    }


def test_a_bad_turn_after_the_second_does_no_harm(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.json", _chat("a question of five words", "an answer of five words", None))
    prompts, skipped = load_sharegpt(path, 10, 0, _USUAL, _Words())
    assert len(prompts) == 1
    assert not skipped


def test_an_asked_length_takes_the_place_of_the_answer_s(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.json", _chat("a question of five words", "short"))
    (prompt,), _ = load_sharegpt(path, 10, 0, LengthFilter(1024, 2048, output_len=300), _Words())
    assert prompt.output_len == 300


def test_an_asked_length_beyond_the_total_leaves_nothing(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.json", _chat("a question of five words", "an answer of five words"))
    prompts, skipped = load_sharegpt(path, 10, 0, LengthFilter(1024, 2048, output_len=2048), _Words())
    assert prompts == []
    assert skipped == {"prompt and answer too long": 1}


def test_a_monstrous_text_is_skipped_without_being_tokenized(tmp_path: Path) -> None:
    path = _write(tmp_path / "c.json", _chat("x" * 1_000_000, "an answer of five words"))
    words = _Words()
    assert load_sharegpt(path, 10, 0, _USUAL, words)[0] == []
    assert words.num_counted == 0


def test_the_same_seed_samples_the_same_prompts() -> None:
    first, _ = load_sharegpt(_FAKE, 10, 3, _USUAL, _Words())
    again, _ = load_sharegpt(_FAKE, 10, 3, _USUAL, _Words())
    other, _ = load_sharegpt(_FAKE, 10, 4, _USUAL, _Words())
    assert first == again
    assert first != other
    assert len(first) == 10


def test_the_fake_file_has_conversations_and_bad_entries() -> None:
    prompts, skipped = load_sharegpt(_FAKE, 1000, 0, _USUAL, _Words())
    assert len(prompts) >= 25
    assert skipped["malformed"] == 4
    assert skipped["fewer than two turns"] == 2


@pytest.mark.parametrize("text", ["", "{}", "[{]"])
def test_a_file_that_is_no_list_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "broken.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"broken\.json"):
        load_sharegpt(path, 10, 0, _USUAL, _Words())
