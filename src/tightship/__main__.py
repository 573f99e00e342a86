"""``python -m tightship`` is the command line."""

import sys

from tightship.cli import main

if __name__ == "__main__":
    sys.exit(main())
