"""Speculative decoding, and prompts computed ahead.

1. `source.py` is the interface of a source of draft tokens.
2. `drafts.py` is an n-gram index of past tokens, and `memory_source.py` drafts what followed the
   same tokens earlier.
3. `model_source.py` drafts with a smaller model that is loaded beside the served one, and
   `head_source.py` with the served model's own head.
4. `planner.py` decides which source to ask, which rows of the next step carry draft tokens, and how
   many, from measured acceptance rates and costs.
5. `ahead.py` computes the beginnings of expected prompts while no request runs, and `reopening.py`
   restores stored conversations.

The model verifies every draft token, so drafts change the speed of a reply and never its tokens.
"""
