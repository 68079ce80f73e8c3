"""`python -m autoshard` is the command `autoshard`."""

import sys

from autoshard.cli import main

if __name__ == "__main__":
    sys.exit(main())
