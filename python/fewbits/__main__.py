"""Runs the command line with ``python -m fewbits``."""

import sys

from fewbits._cli import main

if __name__ == "__main__":
    sys.exit(main())
