"""A whole server, started as users start it, under the load generator."""

import subprocess
from pathlib import Path

from script_tools.load_generator import load_command
from script_tools.running_server import running_server

_LOAD = ("--prompt_len", "200", "--output_len", "100", "--num_prompts", "500", "--max_concurrency", "100")


def run_server(gguf: Path) -> bool:
    """Serve a model and send it 500 requests, 100 at a time; whether all were answered."""
    with running_server(["--model_dir", str(gguf)]) as server:
        command = load_command(server.url, [*_LOAD, "--max_failed_frac", "0"])
        return subprocess.run(command, check=False).returncode == 0
