"""The GPU's engine over tiny models: on a GPU if there is one, else on a CPU that interprets its kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lightserve.model_config import load_model_config
from lightserve.model_worker.cuda.blueprint import CudaBlueprint, load_blueprint
from lightserve.model_worker.cuda.graph import Capturer, CudaCapturer
from lightserve.model_worker.cuda.runner import CudaRunner
from lightserve.model_worker.engine import Engine
from lightserve.model_worker.tensor_parallel import SingleRank
from tests.model_worker.tiny_engine import MAX_LEN, NUM_ROWS, NUM_SLOTS

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@dataclass(frozen=True)
class PlainGraph:
    """Implements ``Graph``: replaying is running."""

    replay: Callable[[], None]


class PlainCapturer:
    """Implements ``Capturer`` on any device."""

    def capture(self, work: Callable[[], None]) -> PlainGraph:
        """Run ``work`` at each replay."""
        return PlainGraph(work)


def make_blueprint(
    folder: Path, *, max_tokens: int = 64, vocab_size: int = 1 << 30, dtype: torch.dtype = torch.float32
) -> CudaBlueprint:
    """Everything about an engine over the model in ``folder`` but its number of slots."""
    config = load_model_config(folder)
    return load_blueprint(
        config,
        SingleRank(),
        num_rows=NUM_ROWS if torch.cuda.is_available() else 5,
        max_tokens=max_tokens,
        max_req_total_len=MAX_LEN,
        vocab_size=min(config.vocab_size, vocab_size),
        dtype=dtype,
        device=DEVICE,
        load_format="auto",
    )


@torch.inference_mode()
def open_cuda_engine(
    folder: Path, *, graphs: bool, vocab_size: int = 1 << 30, dtype: torch.dtype = torch.float32
) -> Engine[CudaRunner]:
    """An engine over the model in ``folder``; without a GPU, its graphs are plain calls."""
    return make_blueprint(folder, vocab_size=vocab_size, dtype=dtype).build(NUM_SLOTS, _capturer() if graphs else None)


def _capturer() -> Capturer:
    if DEVICE.type == "cpu":
        return PlainCapturer()
    stream = torch.cuda.Stream(DEVICE)  # type: ignore[no-untyped-call]  # torch gives it no types
    torch.cuda.set_stream(stream)
    return CudaCapturer(stream)
