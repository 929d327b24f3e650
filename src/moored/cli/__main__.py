"""`python -m moored.cli` runs the `moored` command."""

import sys

from . import main

sys.exit(main())
