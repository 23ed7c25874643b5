"""Blocks of attention state: git's objects."""
