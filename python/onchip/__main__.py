"""python -m onchip: the command line."""

import sys

from onchip.cli import main

sys.exit(main())
