"""`python -m paceline`: the command line."""

import sys

from paceline.cli import main

sys.exit(main())
