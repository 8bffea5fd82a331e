from pathlib import Path

import numpy as np
import pytest
from benchmark.traces import RandomIds, TraceRow, read_trace


def _write(path: Path, text: str) -> Path:
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "text",
    [
        "prompt_len,output_len\n155,6\n24,59\n",
        "num_prefill_tokens,num_decode_tokens,num_total_tokens,pd_ratio\n155,6,161,25.8\n24,59,83,0.4\n",
        "\ufeffprompt_len,output_len\r\n155,6\r\n24,59\r\n",
    ],
)
def test_lengths_are_read_by_the_names_of_their_columns(tmp_path: Path, text: str) -> None:
    assert read_trace(_write(tmp_path / "t.csv", text), None) == [TraceRow(155, 6), TraceRow(24, 59)]


def test_azure_timestamps_are_seconds(tmp_path: Path) -> None:
    text = (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.6805900,374,44\n"
        "2023-11-16 18:15:50.9951690,396,109\n"
    )
    first, second = RandomIds(1000, 0).prompts(read_trace(_write(tmp_path / "t.csv", text), None))
    assert first.timestamp_s == 0.0
    assert second.timestamp_s == pytest.approx(4.314579, abs=1e-6)


def test_mooncake_prompts_share_the_tokens_of_shared_blocks(tmp_path: Path) -> None:
    text = (
        '{"timestamp": 0, "input_length": 1100, "output_length": 6, "hash_ids": [0, 1, 2]}\n'
        '{"timestamp": 27500, "input_length": 1030, "output_length": 4, "hash_ids": [0, 1, 3]}\n'
    )
    first, second = RandomIds(50_000, 0).prompts(read_trace(_write(tmp_path / "t.jsonl", text), None))
    assert (first.prompt_len, len(first.content()), second.timestamp_s) == (1100, 1100, 27.5)
    assert first.content()[:1024] == second.content()[:1024]
    assert first.content()[1024:1030] != second.content()[1024:1030]


def test_rows_without_prompt_or_answer_are_left_out(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.csv", "prompt_len,output_len\n0,5\n5,0\n7,3\n8,4\n")
    assert read_trace(path, 1) == [TraceRow(7, 3)]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("columns.csv", "a,b\n1,2\n"),
        ("empty.csv", ""),
        ("word.csv", "prompt_len,output_len\n1,many\n"),
        ("short.csv", "prompt_len,output_len\n1\n"),
        ("broken.jsonl", '{"timestamp": 0}\n'),
        ("field.csv", f'prompt_len,output_len\n"{"5" * 200_000}",5\n'),
    ],
)
def test_an_unreadable_trace_is_refused_by_its_name_once(tmp_path: Path, name: str, text: str) -> None:
    with pytest.raises(ValueError, match=name) as error_info:
        read_trace(_write(tmp_path / name, text), None)
    assert str(error_info.value).count(name) == 1


_BLOCKS = '{{"timestamp": 0, "input_length": {}, "output_length": 4, "hash_ids": [0, {}]}}\n'


@pytest.mark.parametrize(
    ("name", "text", "row"),
    [
        ("long.csv", f"prompt_len,output_len\n5,5\n5,{2**31}\n", 2),
        ("word.csv", "prompt_len,output_len\n5,5\n5,5\n1,many\n", 3),
        ("short.csv", "prompt_len,output_len\n1\n", 1),
        ("long.jsonl", _BLOCKS.format(1000, 1) + _BLOCKS.format(10**15, 1), 2),
        ("hash.jsonl", _BLOCKS.format(1000, 2**63), 1),
        ("negative.jsonl", _BLOCKS.format(1000, -1), 1),
    ],
)
def test_a_malformed_row_is_refused_by_its_number(tmp_path: Path, name: str, text: str, row: int) -> None:
    with pytest.raises(ValueError, match=rf"{name}: row {row}: "):
        read_trace(_write(tmp_path / name, text), None)


def test_the_longest_lengths_and_largest_hashes_are_read(tmp_path: Path) -> None:
    path = _write(tmp_path / "t.jsonl", _BLOCKS.format(2**31 - 1, 2**63 - 1))
    assert read_trace(path, None) == [TraceRow(2**31 - 1, 4, 0.0, (0, 2**63 - 1))]


def test_random_ids_keep_away_from_both_ends_of_the_vocabulary() -> None:
    (prompt,) = RandomIds(1000, 0).prompts([TraceRow(10_000, 1)])
    ids = np.array(prompt.content())
    assert ids.min() == 20
    assert ids.max() == 979


def test_random_ids_depend_on_the_seed_alone() -> None:
    rows = [TraceRow(50, 1), TraceRow(50, 1)]
    contents = [[p.content() for p in RandomIds(1000, seed).prompts(rows)] for seed in (1, 1, 2)]
    assert contents[0] == contents[1]
    assert contents[0] != contents[2]
    assert contents[0][0] != contents[0][1]
