"""The callbacks of rsipo_lightning."""

if __name__ == "callbacks":  # a second copy of every class would be made
    raise ImportError("import rsipo_lightning.callbacks, not callbacks")
