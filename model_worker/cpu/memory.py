"""What a CPU worker's memory must hold beside weights and pool, so that no step runs out of it later."""

import torch

from lightserve.model_config import ModelConfig

# A step that would sample more rows is run in pieces (``CpuRunner``): it bounds the memory for logits.
MAX_SAMPLED_AT_ONCE = 256
# Per sampled row and id: logits, scores, and those of rows with penalties before and after.
_SAMPLING_BYTES = 4 * 4
# Per token, times the widths that pass by: projections, the residual stream, and what the operations between make.
_ACTIVATION_BYTES = 4 * 4


def reserved_bytes(config: ModelConfig, *, num_rows: int, max_req_total_len: int, batch_max_tokens: int) -> int:
    """Estimate, from above, the largest step and the state of ``num_rows`` requests that all have penalties."""
    sampling = min(num_rows, MAX_SAMPLED_AT_ONCE) * config.vocab_size * _SAMPLING_BYTES
    widths = 2 * config.intermediate_size + config.hidden_size + 2 * config.num_heads * config.head_dim
    activations = batch_max_tokens * widths * _ACTIVATION_BYTES
    rows = (num_rows + 1) * (config.vocab_size + max_req_total_len) * torch.int32.itemsize
    return sampling + activations + rows


def is_out_of_memory(error: RuntimeError) -> bool:
    """Tell whether torch could not allocate: on CPUs it has no error class of its own for that."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)
