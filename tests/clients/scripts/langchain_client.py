"""LangChain: a reply, a stream, and a tool that must be called."""

import json
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool


@tool
def get_weather(city: str) -> str:
    """Tell the weather in a city."""
    return f"rain in {city}"


url, model_name = sys.argv[1:]
model = ChatAnthropic(model=model_name, base_url=url, api_key="none", max_tokens=60)
whole = model.invoke("Say hi.")
pieces = [chunk.text for chunk in model.stream("Say hi.")]
calling = model.bind_tools([get_weather], tool_choice="get_weather").invoke("Weather in Rome?")
print(
    json.dumps(
        {
            "text": whole.text,
            "streamed": "".join(pieces),
            "usage": whole.usage_metadata,
            "calls": [{"name": c["name"], "args": c["args"]} for c in calling.tool_calls],
        }
    )
)
