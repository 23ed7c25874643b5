"""From a conversation to the tokens a model reads.

1. `renderer.py` leads the way; `requests/prepare.py` calls it.
2. `template_probe.py` found out, once per model, what its chat template can show.
3. `compose.py` puts the request into the template's terms: tools, system prompt, messages.
4. `special_text.py` guards text from clients, so that it cannot become a special token; the
   template renders, and only the runs of text that were not encoded before are encoded.
5. `replay.py` gives the tokens that were sampled for a reply that was generated here and comes
   back as text.

`lru_cache.py` is the bounded cache behind all of these. An agent's prompts keep showing the date of
its first turn.
"""
