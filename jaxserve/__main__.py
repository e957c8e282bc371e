"""`python -m jaxserve` is the command `jaxserve`."""

import sys

from jaxserve.cli import main

sys.exit(main())
