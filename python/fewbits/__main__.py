"""``python -m fewbits`` is the command line."""

import sys

from fewbits._cli import main

sys.exit(main())
