"""From a conversation to the tokens a model reads.

`renderer` leads the way. `compose` puts a request into the terms of the model's chat template,
which `template_probe` asked at the start what it can show; text from outside is guarded by
`special_text`, so that no special token comes of it. The template writes the text, and a walk along
it, run by run, encodes only what was not encoded before. Where a reply that was made
here comes back, `replay` has the tokens it was sampled as, and the walk takes those. An
agent's prompts show the day on which it first spoke. What was worked out before waits in an
`lru_cache`. `requests` calls this chapter; its tokens go to `engine`.
"""
