"""Turns a reply's tokens into text, and splits the text into thinking, answer and tool calls.

Everything works on a reply while it streams.

1. `reply_parser.py` turns tokens into text on the device thread (`TextAssembler`; stop strings end
   the reply), and passes the text through the splitters on the event loop (`ReplyParser`).
2. `splitter.py` separates thinking, and holds back text that may become a marker.
3. `call_splitter.py` finds tool calls, with the syntax that `call_syntax.py` makes of the model's
   notation; `cursor.py` says where more text is needed. Arguments stream through
   `json_arguments.py`, `tag_arguments.py` or `literal_arguments.py` (Python and Gemma);
   `call_blocks.py` reads JSON with the name after the arguments once it is complete. `harmony.py`
   does all of this for the channels of GPT-OSS.
4. At the end `MessageFold` (`reply_parser.py`) folds the events into the message that is logged
   with the turn.

Rules for every format:

- The joined events do not depend on how the text is cut into pieces.
- A call is announced once its name is complete and names an offered tool; in Python, where answers
  may look like calls, once its first value begins. Text that only looks like a call (unknown tool,
  syntax error before that point) is emitted as text, with its markup.
- The joined arguments of a call that ended are always one valid JSON object. Common mistakes of
  models are repaired (raw line breaks in strings, bad escapes, trailing commas, Python literals).
  At any other syntax error the JSON is closed after its last complete part, and the rest is text.
- A call that is cut off (by `max_tokens`, a stop string, a cancellation or a failure) has no
  `ToolCallEnded`, and its arguments are an incomplete JSON object. It is not emitted as text. If it
  is cut off before its name is complete, it is not emitted at all.
- If no tools are offered, tool markup is plain text; thinking is still separated.
"""

from semantic.application.parsing.reply_parser import (
    MessageFold,
    ReplyParser,
    TextAssembler,
    fold_message,
)

__all__ = ["MessageFold", "ReplyParser", "TextAssembler", "fold_message"]
