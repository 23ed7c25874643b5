"""Turns a conversation into the prompt's tokens.

1. `renderer.py` runs the steps below; `requests/prepare.py` calls it.
2. `template_probe.py` determines, once per model, what the chat template supports, and
   `format_probe.py` how the model writes thinking and tool calls.
3. `compose.py` converts the request to the template's input: tools, system prompt, messages.
4. `special_text.py` guards text from clients, so that it cannot become a special token. After the
   template has rendered, it encodes only runs of text that are not in its cache.
5. `replay.py` returns the sampled tokens of a reply that this server generated and a client sends
   back as text. Its `LruCache` bounds the caches of these modules.

`images.py` prepares the images of a request; the renderer puts them in place of the template's
markers.

`tool_turns.py` renders the prompt that follows a tool call, as far as it is known before the
result.

A raw prompt passes none of these steps; `fill_in.py` encodes it, also one that asks for the text
before a suffix.

An agent's prompts always show the date of its first turn.
"""
