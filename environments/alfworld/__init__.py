"""ALFWorld: household tasks in text, with a built-in game engine and the package's own."""
