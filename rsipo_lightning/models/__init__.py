"""Policies that are shipped with the package: one Hugging Face folder each."""
