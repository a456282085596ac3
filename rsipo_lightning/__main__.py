"""``python -m rsipo_lightning`` is ``rsipo-fit``."""

import sys

from rsipo_lightning.cli import fit_main

sys.exit(fit_main())
