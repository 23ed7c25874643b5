"""Compaction: a summary takes the place of the oldest part of a conversation.

1. `summary.py` asks the model for a summary, on the KV cache of the conversation itself, and says
   where a conversation may be cut.
2. `prefill.py` computes a prompt without a reply or a turn.
3. `successor.py` turns an agent into a branch that continues from its summary, and computes that
   branch before its next turn.
4. `clients.py` recognises clients that compact by themselves, and has what they send next computed.
"""
