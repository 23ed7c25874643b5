"""Blocks of attention state in files."""
