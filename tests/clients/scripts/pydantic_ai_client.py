"""Pydantic AI: output of a type, which it asks for as a tool call."""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.providers.anthropic import AnthropicProvider


class City(BaseModel):
    """A city."""

    name: Literal["Paris", "Rome"]


url, model_name = sys.argv[1:]
model = AnthropicModel(model_name, provider=AnthropicProvider(base_url=url, api_key="none"))
settings = {"max_tokens": 120}
plain = Agent(model).run_sync("Say hi.", model_settings=settings)
typed = Agent(model, output_type=City).run_sync("A city in Italy?", model_settings=settings)
print(json.dumps({"text": plain.output, "city": typed.output.name}))
