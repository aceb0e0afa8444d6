"""``python -m fewbits`` is the command line."""

import sys

from fewbits._cli import main

if __name__ == "__main__":
    sys.exit(main())
