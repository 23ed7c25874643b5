"""Clients of OpenAI's API as their users install them, against the starter model.

Each runs in a process of its own, sees an empty home, and talks to 127.0.0.1 only.
"""

import json
from pathlib import Path

import pytest

from semantic.adapters.config.settings import STARTER_MODEL
from tests.clients.conftest import run_client
from tests.smoke.server_process import ServerProcess

pytestmark = pytest.mark.clients

NEEDED_TEXT = "Paris"

OPENAI_PYTHON = """
import os, openai
client = openai.OpenAI(_strict_response_validation=True)
asked = dict(model=os.environ["MODEL"], temperature=0)
question = "What is the capital of France? Answer in one sentence."
chat = client.chat.completions.create(messages=[{"role": "user", "content": question}], **asked)
print(chat.choices[0].message.content)
first = client.responses.create(input=question, **asked)
second = client.responses.create(input="And of Spain?", previous_response_id=first.id, **asked)
print(first.output_text, second.output_text)
assert second.usage.input_tokens_details.cached_tokens >= first.usage.total_tokens - 1, second.usage
raw = client.completions.create(prompt="The capital of France is", max_tokens=4, **asked)
print(raw.choices[0].text)
"""

LANGCHAIN = """
import os
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

class Answer(BaseModel):
    city: str
    is_capital: bool

@tool
def get_population(city: str) -> int:
    "Return a city's population."
    return 2_100_000

for has_responses in (False, True):
    llm = ChatOpenAI(
        model=os.environ["MODEL"], temperature=0, max_tokens=80, use_responses_api=has_responses
    )
    print(llm.invoke("What is the capital of France? Answer in one sentence.").text)
    print("".join(chunk.text for chunk in llm.stream("Name the capital of France.")))
    parsed = llm.with_structured_output(Answer).invoke("Is Paris a capital?")
    assert isinstance(parsed, Answer), parsed
    called = llm.bind_tools([get_population], tool_choice="get_population").invoke("Paris?")
    assert called.tool_calls[0]["name"] == "get_population", called
"""

LITELLM = """
import os, litellm
asked = dict(model="openai/" + os.environ["MODEL"], temperature=0, max_tokens=40)
messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
print(litellm.completion(messages=messages, **asked).choices[0].message.content)
text = ""
for chunk in litellm.completion(messages=messages, stream=True, **asked):
    text += chunk.choices[0].delta.content or ""
print(text)
"""

PYDANTIC_AI = """
import os
from pydantic import BaseModel
from pydantic_ai import Agent, ModelSettings
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel

class Answer(BaseModel):
    city: str

settings = ModelSettings(temperature=0, max_tokens=120)
for kind in (OpenAIChatModel, OpenAIResponsesModel):
    model = kind(os.environ["MODEL"])
    question = "What is the capital of France? Answer in one sentence."
    print(Agent(model, model_settings=settings).run_sync(question).output)
    agent = Agent(model, output_type=Answer, model_settings=settings, retries=3)
    assert isinstance(agent.run_sync("What is the capital of France?").output, Answer)
"""

OPENAI_AGENTS = """
import os
from agents import Agent, ModelSettings, Runner, function_tool, set_tracing_disabled
set_tracing_disabled(True)

@function_tool
def get_weather(city: str) -> str:
    "Return the weather of a city."
    return "sunny"

settings = ModelSettings(temperature=0, max_tokens=80)
agent = Agent(name="a", model=os.environ["MODEL"], model_settings=settings)
first = Runner.run_sync(agent, "What is the capital of France? Answer in one sentence.")
print(first.final_output)
again = first.to_input_list() + [{"role": "user", "content": "And of Spain?"}]
second = Runner.run_sync(agent, again)
cached = second.context_wrapper.usage.input_tokens_details.cached_tokens
assert cached >= first.context_wrapper.usage.total_tokens - 1, second.context_wrapper.usage
once = dict(tool_choice="required", parallel_tool_calls=False)
required = ModelSettings(temperature=0, max_tokens=120, **once)
caller = Agent(
    name="b", model=os.environ["MODEL"], model_settings=required, tools=[get_weather],
    instructions="Use the tool.", tool_use_behavior="stop_on_first_tool",
)
print(Runner.run_sync(caller, "Weather in Paris?").final_output)
"""

OPENAI_NODE = """
import OpenAI from "openai";
const client = new OpenAI();
const model = process.env.MODEL;
const content = "What is the capital of France? Answer in one sentence.";
const messages = [{role: "user", content}];
const chat = await client.chat.completions.create({model, messages, temperature: 0});
console.log(chat.choices[0].message.content);
const stream = client.responses.stream({model, input: content, temperature: 0});
stream.on("response.output_text.delta", event => process.stdout.write(event.delta));
const final = await stream.finalResponse();
if (final.status !== "completed") throw new Error(JSON.stringify(final));
"""

AI_SDK = """
import { createOpenAI } from "@ai-sdk/openai";
import { generateText } from "ai";
const sent = [];
const ask = (url, request) => { sent.push(JSON.parse(request.body)); return fetch(url, request); };
const openai = createOpenAI({baseURL: process.env.OPENAI_BASE_URL, apiKey: "none", fetch: ask});
const model = openai(process.env.MODEL);
const content = "What is the capital of France? Answer in one sentence.";
const messages = [{role: "user", content}];
const first = await generateText({model, messages, temperature: 0, maxOutputTokens: 40});
messages.push(...first.response.messages, {role: "user", content: "And of Spain?"});
const second = await generateText({model, messages, temperature: 0, maxOutputTokens: 40});
if (!sent[1].input.some(item => item.type === "item_reference")) throw new Error("no reference");
const reused = second.usage.inputTokenDetails.cacheReadTokens;
if (reused < first.usage.totalTokens - 1) throw new Error(JSON.stringify(second.usage));
console.log(first.text);
"""

CODEX_CONFIG = """
model = "{model}"
model_provider = "local"
model_context_window = 8192
model_instructions_file = "{instructions}"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
"""


class Desk:
    """A user's machine: an empty home, clients, and a server to talk to."""

    def __init__(self, clients: Path, url: str, home: Path) -> None:
        self.clients, self.url, self.home = clients, url, home

    @property
    def python(self) -> str:
        return str(self.clients / "venv" / "bin" / "python")

    def run(self, *command: str) -> str:
        environment = {
            "OPENAI_BASE_URL": f"{self.url}/v1",
            "OPENAI_API_KEY": "none",
            "MODEL": STARTER_MODEL,
            "NO_PROXY": "*",
        }
        done = run_client(command, self.home, environment)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr


@pytest.fixture
def desk(clients: Path, server: ServerProcess, tmp_path: Path) -> Desk:
    return Desk(clients, server.url, tmp_path)


@pytest.mark.parametrize(
    "script",
    [OPENAI_PYTHON, LANGCHAIN, PYDANTIC_AI],
    ids=["openai", "langchain-openai", "pydantic-ai"],
)
def test_python_clients(desk: Desk, script: str) -> None:
    assert NEEDED_TEXT in desk.run(desk.python, "-c", script)


def test_litellm(desk: Desk) -> None:
    python = desk.clients / "litellm" / "bin" / "python"
    assert NEEDED_TEXT in desk.run(str(python), "-c", LITELLM)


def test_openai_agents(desk: Desk) -> None:
    said = desk.run(desk.python, "-c", OPENAI_AGENTS)
    assert NEEDED_TEXT in said
    assert "sunny" in said


@pytest.mark.parametrize("source", [OPENAI_NODE, AI_SDK], ids=["openai", "ai-sdk"])
def test_packages_for_node(desk: Desk, source: str) -> None:
    script = desk.clients / "client.mjs"  # beside the modules it imports
    script.write_text(source)
    assert NEEDED_TEXT in desk.run("node", str(script))


def test_llm(desk: Desk) -> None:
    config = desk.home / "llm"
    config.mkdir()
    entry = f"- model_id: local\n  model_name: {STARTER_MODEL}\n  api_base: {desk.url}/v1\n"
    (config / "extra-openai-models.yaml").write_text(entry)
    question = "What is the capital of France? Answer in one sentence."
    program = f"LLM_USER_PATH={config} {Path(desk.python).parent}/llm -m local"
    assert NEEDED_TEXT in desk.run("sh", "-c", f"{program} -o temperature 0 '{question}'")
    desk.run("sh", "-c", f"{program} -c -o max_tokens 20 'And of Spain?'")


def test_codex_goes_on_with_its_session(desk: Desk) -> None:
    config = desk.home / ".codex"
    config.mkdir()
    instructions = config / "instructions.md"
    instructions.write_text("Answer in one short sentence.")
    (config / "config.toml").write_text(
        CODEX_CONFIG.format(model=STARTER_MODEL, instructions=instructions, url=desk.url)
    )
    codex = str(desk.clients / "node_modules" / ".bin" / "codex")
    asked = ("--skip-git-repo-check", "--json")
    usages = []
    for command in (("exec", "-s", "read-only"), ("exec", "resume", "--last")):
        said = desk.run(codex, *command, *asked, "What is the capital of France?")
        events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        usages += [event["usage"] for event in events if event["type"] == "turn.completed"]
    first, second = usages
    total = first["input_tokens"] + first["output_tokens"]
    # Codex adds up what a session has used.
    assert second["cached_input_tokens"] - first["cached_input_tokens"] >= total - 1, usages
