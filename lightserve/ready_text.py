"""What the operator reads when the server is ready: one line, and a command that works."""

import json
from pathlib import Path

from lightserve.boot import Boot
from lightserve.ipc.messages import ReadyMsg
from lightserve.tokenizer import has_chat_template

_QUESTION = "What is the capital of France?"


def ready_text(boot: Boot, base_url: str, router: ReadyMsg) -> str:
    """Say where the model is served and with how many slots, and how to try it."""
    why = f" ({router.note})" if router.note else ""
    return (
        f"lightserve is ready: {boot.served_model_name} on {base_url}, "
        f"max_total_token_num {router.max_total_token_num}{why}\n{_curl_line(boot, base_url)}"
    )


def _curl_line(boot: Boot, base_url: str) -> str:
    body: dict[str, object] = {"model": boot.served_model_name, "temperature": 0}
    if has_chat_template(Path(boot.tokenizer_dir)):
        path = "/v1/chat/completions"
        body["messages"] = [{"role": "user", "content": _QUESTION}]
    else:
        path = "/v1/completions"
        body["prompt"] = _QUESTION
    key = " -H 'Authorization: Bearer YOUR_API_KEY'" if boot.config.api_key else ""
    data = json.dumps(body).replace("'", "'\\''")
    return f"curl {base_url}{path} -H 'Content-Type: application/json'{key} -d '{data}'"
