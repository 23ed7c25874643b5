"""Prompts that change from turn to turn although their conversations only grow.

`spans.py` compares consecutive prompts and names what changes: a date, a counter, a path, the order
of the tools. `rules.py` defines the rules that repair such requests before they are rendered.
"""
