"""What decode and prefill attention share: the formula in plain torch, and how a kernel loads heads of any width."""

import torch
import triton
import triton.language as tl

LOG2_E = 1.4426950408889634  # exp(x) = exp2(x · LOG2_E)


def attend_reference(q: torch.Tensor, kv: torch.Tensor, scale: float) -> torch.Tensor:
    """Attend causally from the last tokens of one request to all of them, in float32.

    Args:
        q: [extend_len, num_heads, head_dim], of the positions [seq_len - extend_len, seq_len).
        kv: [seq_len, 2, num_kv_heads, head_dim].
        scale: Of the scores, before the softmax.

    Returns:
        [extend_len, num_heads, head_dim] float32; zeros when seq_len is 0.
    """
    extend_len, num_heads, head_dim = q.shape
    seq_len, _, num_kv_heads, _ = kv.shape
    grouped = q.float().view(extend_len, num_kv_heads, num_heads // num_kv_heads, head_dim)
    k, v = kv.float().unbind(1)
    scores = torch.einsum("qkgd,skd->kgqs", grouped, k) * scale
    unseen = torch.ones(extend_len, seq_len, dtype=torch.bool, device=q.device).triu(seq_len - extend_len + 1)
    probs = scores.masked_fill(unseen, float("-inf")).softmax(-1)
    return torch.einsum("kgqs,skd->qkgd", probs, v).reshape(q.shape)


@triton.jit
def load_heads(address, column, WIDTH: tl.constexpr):
    """Load rows of ``WIDTH`` elements; the columns that fill them up to a power of two are 0."""
    if address.shape[1] == WIDTH:
        return tl.load(address)
    return tl.load(address, mask=(column < WIDTH)[None, :], other=0)
