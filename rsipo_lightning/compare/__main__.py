"""``python -m rsipo_lightning.compare`` is ``rsipo-compare``."""

import sys

from rsipo_lightning.compare.cli import main

sys.exit(main())
