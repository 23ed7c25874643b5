"""`semantic doctor`: what is wrong on this machine, and what this machine can do.

1. `checks.py`: the command, and the checks that take a moment.
2. `self_test.py`: replies and speed of the real server, for `doctor --report`.
3. `report.py`: both as a text to paste into an issue.
"""
