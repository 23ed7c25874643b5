"""From a reply's text, as it streams, to thinking, text and tool calls.

1. `reply_parser.py` gets the engine's events and passes their text through the splitters.
2. `splitter.py` separates thinking, and holds back what may yet become a marker.
3. `call_splitter.py` finds tool calls, by the family's table in `call_syntax.py`: JSON arguments
   stream through `json_arguments.py`, other notations are read whole by `call_blocks.py`.
   `harmony.py` does all of this for GPT-OSS's channels.
4. At the end `reply_parser.py` folds the events into the message that is logged with the turn.

Rules for every format:

- However the text is cut into pieces, the joined events are the same.
- A call is announced once its name is certain and is that of an offered tool. What looked like a
  call but is not (unknown tool, broken syntax before that point) comes back as text, with markup.
- The arguments of an announced call, joined, are always one valid JSON object. Common mistakes of
  models are repaired on the way (raw line breaks in strings, bad escapes, trailing commas, Python
  literals); where the JSON breaks off it is closed after its last complete part, and what follows
  the break is text. A call cut off by `max_tokens` keeps that finish reason, so that clients can
  tell.
- Without offered tools their markup is plain text; thinking is still separated.
"""

from semantic.application.parsing.reply_parser import MessageFold, ReplyParser, fold_message

__all__ = ["MessageFold", "ReplyParser", "fold_message"]
