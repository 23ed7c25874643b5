"""LiteLLM: a reply and a stream through its Anthropic provider."""

import json
import sys

import litellm

url, model_name = sys.argv[1:]
common = {
    "model": f"anthropic/{model_name}",
    "api_base": url,
    "api_key": "none",
    "max_tokens": 20,
    "messages": [{"role": "user", "content": "Say hi."}],
}
whole = litellm.completion(**common)
chunks = list(litellm.completion(**common, stream=True))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
print(
    json.dumps(
        {
            "text": whole.choices[0].message.content,
            "streamed": text,
            "prompt_tokens": whole.usage.prompt_tokens,
            "completion_tokens": whole.usage.completion_tokens,
        }
    )
)
