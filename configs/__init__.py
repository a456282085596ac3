"""YAML groups and prompt texts."""

if __name__ == "configs":  # a second copy of every class would be made
    raise ImportError("import rsipo_lightning.configs, not configs")
