"""The environments of rsipo_lightning."""

if __name__ == "environments":  # a second copy of every class would be made
    raise ImportError("import rsipo_lightning.environments, not environments")
