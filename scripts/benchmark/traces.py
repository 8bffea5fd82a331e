"""Prompts of random token ids, with lengths (and arrivals) from a trace."""

import csv
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from script_tools.plain_ids import draw_ids

from benchmark.prompt import Prompt

# (prompt column, output column) of the published traces.
_LENGTH_COLUMNS = (
    ("prompt_len", "output_len"),
    ("ContextTokens", "GeneratedTokens"),
    ("num_prefill_tokens", "num_decode_tokens"),
)
_TIME_COLUMN = "TIMESTAMP"
# Tokens per entry of hash_ids in Mooncake's traces.
_BLOCK_LEN = 512
_MAX_LEN, _MAX_BLOCK_ID = 2**31 - 1, 2**63 - 1


@dataclass(frozen=True)
class TraceRow:
    """One request of a trace.

    Attributes:
        timestamp_s: Arrival, on the trace's own clock; None where it has none.
        block_ids: Names of the prompt's blocks of 512 tokens; prompts that share one share its tokens.
    """

    prompt_len: int
    output_len: int
    timestamp_s: float | None = None
    block_ids: tuple[int, ...] = ()


class _MooncakeRow(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: list[int] = []


def read_trace(path: Path, num_rows: int | None) -> list[TraceRow]:
    """Read the first rows of a .csv or .jsonl trace; rows without a prompt or an answer are left out.

    Raises:
        OSError: It cannot be read.
        ValueError: The columns are not those of a known trace, or a row is malformed; names the file and the row.
    """
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = _jsonl_rows(file) if path.suffix == ".jsonl" else _csv_rows(file)
        try:
            return list(islice((row for row in rows if row.prompt_len > 0 and row.output_len > 0), num_rows))
        except (ValueError, csv.Error) as error:
            raise ValueError(f"{path}: {error}") from error


def _csv_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    reader = csv.DictReader(lines)
    names = reader.fieldnames or ()
    columns = next((pair for pair in _LENGTH_COLUMNS if set(pair) <= set(names)), None)
    if columns is None:
        known = ", ".join("/".join(pair) for pair in _LENGTH_COLUMNS)
        raise ValueError(f"has columns {list(names)}; known are {known}")
    for number, row in enumerate(reader, start=1):
        try:
            lens = (int(row[columns[0]]), int(row[columns[1]]))
            yield _checked(TraceRow(*lens, _read_time(row.get(_TIME_COLUMN))))
        except (ValueError, TypeError) as error:  # a row that is too short has None for a length
            raise ValueError(f"row {number}: {error}") from error


def _read_time(text: str | None) -> float | None:
    # Azure's have seven digits after the point; fromisoformat takes six.
    return None if text is None else datetime.fromisoformat(text[:26]).timestamp()


def _jsonl_rows(lines: Iterable[str]) -> Iterator[TraceRow]:
    for number, line in enumerate(lines, start=1):
        try:
            row = msgspec.json.decode(line, type=_MooncakeRow)
            yield _checked(TraceRow(row.input_length, row.output_length, row.timestamp / 1e3, tuple(row.hash_ids)))
        except ValueError as error:
            raise ValueError(f"row {number}: {error}") from error


def _checked(row: TraceRow) -> TraceRow:
    if max(row.prompt_len, row.output_len) > _MAX_LEN:
        raise ValueError(f"lengths {row.prompt_len} and {row.output_len} must be below 2^31")
    if not all(0 <= block_id <= _MAX_BLOCK_ID for block_id in row.block_ids):
        raise ValueError("hash_ids must be from 0 to 2^63 - 1")
    return row


class RandomIds:
    """Draws prompts of token ids that no tokenizer treats as special.

    Args:
        vocab_size: Number of ids.
        seed: Of the draw.
    """

    def __init__(self, vocab_size: int, seed: int) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._rng = np.random.default_rng(seed)

    def prompts(self, rows: list[TraceRow]) -> list[Prompt]:
        """Draw a prompt for each row."""
        first_s = min((row.timestamp_s for row in rows if row.timestamp_s is not None), default=0.0)
        return [self._prompt(row, first_s) for row in rows]

    def _prompt(self, row: TraceRow, first_s: float) -> Prompt:
        arrival_s = None if row.timestamp_s is None else row.timestamp_s - first_s
        return Prompt(self._ids(row), row.prompt_len, row.output_len, arrival_s)

    def _ids(self, row: TraceRow) -> npt.NDArray[np.int32]:
        generators = [np.random.default_rng((self._seed, block_id)) for block_id in row.block_ids]
        blocks = [draw_ids(generator, self._vocab_size, _BLOCK_LEN) for generator in generators]
        missing = max(0, row.prompt_len - len(blocks) * _BLOCK_LEN)
        return np.concatenate([*blocks, draw_ids(self._rng, self._vocab_size, missing)])[: row.prompt_len]
