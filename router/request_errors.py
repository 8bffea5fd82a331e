"""The errors with which the router ends a request."""

from lightserve.ipc.messages import ErrorInfo
from lightserve.router.limits import Limits
from lightserve.router.request import Req

TIMEOUT = ErrorInfo(504, "timeout", "The request's own time limit has passed.")
NOT_FINITE = ErrorInfo(500, "not_finite", "The model's output for this request was not finite.")


def refusal(req: Req, limits: Limits, *, queue_is_full: bool) -> ErrorInfo | None:
    """Say why a request is not taken in, if it can never run or nobody more may wait."""
    total_len = req.prompt_len + req.sampling.max_new_tokens
    asked = f"Prompt ({req.prompt_len}) and max_new_tokens ({req.sampling.max_new_tokens})"
    if total_len > limits.max_req_total_len:
        message = f"{asked} exceed max_req_total_len ({limits.max_req_total_len})."
        return ErrorInfo(400, "context_length_exceeded", message)
    if req.max_slots > limits.max_total_token_num:
        message = f"{asked} can never fit max_total_token_num ({limits.max_total_token_num})."
        return ErrorInfo(400, "context_length_exceeded", message)
    if queue_is_full:
        return ErrorInfo(429, "queue_full", f"{limits.max_queued_reqs} requests are waiting already.")
    return None
