"""Changes conversations before they are rendered.

`repairs.py` applies the rules that keep volatile text from changing a prompt.
"""
