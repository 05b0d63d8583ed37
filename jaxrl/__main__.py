"""`python -m jaxrl`: the `jaxrl` command."""

import sys

from jaxrl.cli import main

sys.exit(main())
