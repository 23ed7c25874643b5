"""The Claude Agent SDK: a session of two questions."""

import asyncio
import json
import os
import sys

from claude_agent_sdk import ClaudeAgentOptions, ClaudeSDKClient, ResultMessage

url, model_name, program, home = sys.argv[1:]


async def main() -> None:
    """Ask twice in one session."""
    environment = {
        "HOME": home,
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_API_KEY": "none",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "200",
    }
    os.environ.update(environment)
    options = ClaudeAgentOptions(
        cli_path=program,
        cwd=home,
        env=environment,
        model=model_name,
        system_prompt="You are terse.",
        tools=[],
        max_turns=1,
        setting_sources=[],
    )
    results = []
    async with ClaudeSDKClient(options=options) as client:
        for question in ("Say hi.", "Say bye."):
            await client.query(question)
            answer = [message async for message in client.receive_response()]
            results += [message.usage for message in answer if isinstance(message, ResultMessage)]
    print(json.dumps(results))


asyncio.run(main())
