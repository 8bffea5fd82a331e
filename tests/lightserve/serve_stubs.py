"""The lightserve command with stubs for children: the launcher alone, for its tests."""

import sys
from pathlib import Path

from lightserve.cli import main
from lightserve.launcher import CHILD_COMMANDS

STUB = str(Path(__file__).with_name("stub_child.py"))

if __name__ == "__main__":
    sys.exit(main(child_commands={kind: (STUB, kind) for kind in CHILD_COMMANDS}))
