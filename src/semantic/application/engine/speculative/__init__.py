"""Speculative decoding without a draft model.

1. `drafts.py` is an n-gram index of past tokens; it proposes what followed the same tokens earlier.
2. `planner.py` decides which rows of the next step carry draft tokens, and how many, from measured
   acceptance rates and step costs.

The model verifies every draft token, so drafts change the speed of a reply and never its tokens.
"""
