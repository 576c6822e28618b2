"""`python -m flywheel`."""

from __future__ import annotations

import sys

from flywheel.cli.main import main

if __name__ == "__main__":  # a pool's child imports this module too
    sys.exit(main())
