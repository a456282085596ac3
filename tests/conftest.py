"""No test may reach for a hub: set before anything imports transformers."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"
