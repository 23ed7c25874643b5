"""From a reply's text, as it streams, to thinking, text and tool calls.

The engine's events go into `reply_parser`. It leads their text through `splitter`, which splits off
thinking and lets what may yet become a marker wait, and then through `call_splitter`; for GPT-OSS's
channels through `harmony` alone. How a family writes its calls is a table in `call_syntax`:
arguments that are JSON stream through `json_arguments`, other notations are read whole by
`call_blocks`. At the end `reply_parser` folds the events into the message that the log of turns
keeps.

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

from semantic.application.parsing.reply_parser import MessageFold, ReplyParser, fold_message

__all__ = ["MessageFold", "ReplyParser", "fold_message"]
