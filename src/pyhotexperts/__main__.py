"""``python -m pyhotexperts``."""

import sys

from pyhotexperts.cli import main

sys.exit(main())
