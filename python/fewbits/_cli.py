"""The command line, the same as that of the program ``quant``."""

from __future__ import annotations

import signal
import sys

from fewbits import _native
from fewbits._call import code, python


def main() -> int:
    """Runs the command line with the process's arguments, and returns the exit code."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # The program handles the signal itself; Python must not raise KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.cli(["quant", *sys.argv[1:]], code(), python())


if __name__ == "__main__":
    sys.exit(main())
