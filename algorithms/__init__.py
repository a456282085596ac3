"""The algorithms of rsipo_lightning."""

if __name__ == "algorithms":  # a second copy of every class would be made
    raise ImportError("import rsipo_lightning.algorithms, not algorithms")
