"""The lightserve command with the fake model worker: everything else is real."""

import sys
from pathlib import Path

from lightserve.cli import main
from lightserve.launcher import CHILD_COMMANDS

FAKE_WORKER = str(Path(__file__).parents[1] / "fakes.py")

if __name__ == "__main__":
    sys.exit(main(child_commands={**CHILD_COMMANDS, "model_worker": (FAKE_WORKER,)}))
