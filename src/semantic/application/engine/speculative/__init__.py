"""Speculative decoding without a draft model, and prompts computed ahead.

1. `drafts.py` is an n-gram index of past tokens; it proposes what followed the same tokens earlier.
2. `planner.py` decides which rows of the next step carry draft tokens, and how many, from measured
   acceptance rates and step costs.
3. `ahead.py` computes the beginnings of expected prompts while no request runs.

The model verifies every draft token, so drafts change the speed of a reply and never its tokens.
"""
