import contextlib
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightserve.errors import ConfigError
from lightserve.gguf_header import GgufHeader
from tests.lightserve.gguf_files import write_gguf_file

WORDS = ["a", "b c", "é", ""]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    extra = {"tokenizer.ggml.tokens": WORDS, "numbers": [1, -2, 3], "flag": True, "general.alignment": 64}
    return write_gguf_file(tmp_path / "m.gguf", extra, {"odd": np.arange(3, dtype=np.float16)})


def test_a_header_reads_as_the_gguf_library_reads_it(path: Path) -> None:
    header, reader = GgufHeader.read(path), gguf.GGUFReader(path)
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert header.metadata == fields
    assert header.metadata["tokenizer.ggml.tokens"] == WORDS
    for expected in reader.tensors:
        tensor = header.tensors[expected.name]
        assert tensor.shape == tuple(int(size) for size in expected.shape[::-1])
        assert (tensor.kind, tensor.offset, tensor.num_bytes) == (
            expected.tensor_type,
            expected.data_offset,
            expected.n_bytes,
        )
    assert len(header.tensors) == len(reader.tensors)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(share=st.floats(0, 0.9999))
def test_a_file_cut_anywhere_is_refused(path: Path, share: float) -> None:
    whole = path.read_bytes()
    cut = path.with_name("cut.gguf")
    # The writer pads behind the last tensor; only a cut into what the header describes must be found.
    used = max(tensor.offset + tensor.num_bytes for tensor in GgufHeader.read(path).tensors.values())
    cut.write_bytes(whole[: int(share * used)])
    with pytest.raises(ConfigError, match=r"cut\.gguf: not a usable GGUF file"):
        GgufHeader.read(cut)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=300)
@given(data=st.data())
def test_a_damaged_header_is_read_or_refused_but_nothing_else(path: Path, data: st.DataObject) -> None:
    damaged = bytearray(path.read_bytes())
    for position in data.draw(st.lists(st.integers(0, min(900, len(damaged) - 1)), min_size=1, max_size=4)):
        damaged[position] = data.draw(st.integers(0, 255))
    target = path.with_name("damaged.gguf")
    target.write_bytes(damaged)
    with contextlib.suppress(ConfigError):
        GgufHeader.read(target)


def test_a_missing_file_and_one_part_of_several_are_refused(path: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.gguf: No such file"):
        GgufHeader.read(tmp_path / "none.gguf")
    part = write_gguf_file(tmp_path / "part.gguf", {"split.count": 3})
    with pytest.raises(ConfigError, match=r"split\.count says this is one part of several"):
        GgufHeader.read(part)
