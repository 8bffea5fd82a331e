"""The lightserve command with a modelled worker for a model worker: everything else is real.

``python -m front_end_bench.serve_modelled_worker PACE serve [flags]``. It ends with its standard input, so that it
cannot outlive whoever started it.
"""

import os
import signal
import sys
import threading

from lightserve.cli import main
from lightserve.launcher import CHILD_COMMANDS


def _stop_with_stdin() -> None:
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    pace, *arguments = sys.argv[1:]
    threading.Thread(target=_stop_with_stdin, daemon=True).start()
    worker = ("-m", "front_end_bench.worker_process", pace)
    sys.exit(main(arguments, {**CHILD_COMMANDS, "model_worker": worker}))
