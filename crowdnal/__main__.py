"""``python -m crowdnal``."""

import sys

from crowdnal.cli import main

if __name__ == "__main__":
    sys.exit(main())
