"""Bounds on what one request may ask for. Whatever grows with a request is bounded here, by the model or by the router.

They are generous: no honest client meets them, and no hostile one gets past them.
"""

CONNECT_BACKLOG = 8192  # connections not yet accepted; 3,000 clients may come at once
MAX_HEAD_BYTES = 64 * 1024  # request line and headers
MAX_PIPELINED = 100  # requests sent before the one ahead of them is answered
REQUEST_TIMEOUT_S = 60  # from its first byte to its last; 16 MiB take so long at 2 Mbit/s
LOST_CLIENT_S = 60  # a client that takes nothing for so long is gone
MAX_BODY_BYTES = 16 * 1024 * 1024
MAX_OPEN_BODY_BYTES = 512 * 1024 * 1024  # of all bodies being read; beyond it no large one is read on
LARGE_BODY_BYTES = 1024 * 1024
MAX_BODY_CONTAINERS = 2**18  # objects and lists: a body of nothing else would keep the decoder for over a second
MAX_CHOICES = 128  # n
MAX_PROMPTS = 1024  # prompts of one /v1/completions body; also the bound on prompts times n
MAX_STOPS = 16
MAX_STOP_CHARS = 1024  # of a request's stop strings together: each costs the detokenizer some 350 bytes
MAX_SALT_CHARS = 256  # cache_salt
MAX_MESSAGES = 16_384

# Longest text that is tokenized at all. Nobody's text averages 32 characters a token, so what is longer cannot fit.
MAX_CHARS_PER_TOKEN = 32
MIN_PROMPT_CHARS = 64 * 1024  # below this the token count itself decides, and the error can name it
MIN_DETOKENIZED_IDS = 64 * 1024  # more only for a model with a longer context

# Events that wait for one streamed client. A client this far behind is given up, or a few that never read would hold
# the memory of all: 16,384 unread tokens are about 6 MB.
MAX_UNREAD_TOKENS = 16_384


def max_prompt_chars(max_req_total_len: int) -> int:
    """Return the most characters of a prompt that are worth tokenizing."""
    return max(MIN_PROMPT_CHARS, MAX_CHARS_PER_TOKEN * max_req_total_len)
