"""``python -m lightserve`` is the ``lightserve`` command."""

import sys

from lightserve.cli import main

if __name__ == "__main__":
    sys.exit(main())
