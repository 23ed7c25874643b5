"""From a reply's text, as it streams, to thinking, text and tool calls.

Rules every format keeps:

- However the text is cut into pieces, the events joined are the same.
- A call is announced once its name is certain and is that of a tool on offer. What looked like a
  call and is none (unknown tool, broken syntax before that point) comes back as text, markup
  included.
- The arguments of an announced call, joined, are always one valid JSON object. What models often
  get wrong is mended on the way (raw line breaks in strings, bad escapes, trailing commas, Python's
  literals); where the JSON breaks off it is closed behind its last complete part, and what follows
  the break is text. A call cut off by `max_tokens` keeps that finish reason, so that clients can
  tell.
- Without tools on offer their markup is plain text; thinking is split off all the same.
"""

from semantic.application.parsing.detection import detect_reply_format
from semantic.application.parsing.folding import MessageFold, fold_message
from semantic.application.parsing.reply_parser import ReplyParser

__all__ = ["MessageFold", "ReplyParser", "detect_reply_format", "fold_message"]
