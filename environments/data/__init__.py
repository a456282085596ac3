"""Data shipped with the environments."""
