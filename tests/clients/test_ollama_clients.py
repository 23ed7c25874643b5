"""Clients of Ollama's API as their users install them, against the starter model."""

import shutil
from pathlib import Path

import pytest

from semantic.adapters.config.settings import STARTER_MODEL
from tests.clients.conftest import run_client
from tests.smoke.server_process import ServerProcess

pytestmark = pytest.mark.clients

NEEDED_TEXT = "Paris"

OLLAMA_PYTHON = """
import os, ollama
from pydantic import BaseModel

class Answer(BaseModel):
    city: str

client, model = ollama.Client(), os.environ["MODEL"]
said = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
options = {"temperature": 0, "num_predict": 60}
first = client.chat(model, said, options=options)
print(first.message.content)
parts = client.chat(model, said, stream=True, options=options)
assert "".join(part.message.content for part in parts) == first.message.content
made = client.chat(model, said, format=Answer.model_json_schema(), options=options)
Answer.model_validate_json(made.message.content)
assert len(client.embed(model, ["a", "b"]).embeddings) == 2
assert client.list().models[0].model == client.ps().models[0].model == model
assert client.show(model).capabilities == ["completion", "tools"]
"""

LANGCHAIN = """
import os
from langchain_ollama import ChatOllama, OllamaEmbeddings
from pydantic import BaseModel

class Answer(BaseModel):
    city: str

usual = dict(model=os.environ["MODEL"], base_url=os.environ["OLLAMA_HOST"])
llm = ChatOllama(temperature=0, num_predict=80, validate_model_on_init=True, **usual)
print(llm.invoke("What is the capital of France? Answer in one sentence.").text)
print("".join(chunk.text for chunk in llm.stream("Name the capital of France.")))
parsed = llm.with_structured_output(Answer).invoke("What is the capital of France?")
assert isinstance(parsed, Answer), parsed
assert len(OllamaEmbeddings(**usual).embed_documents(["a", "b"])) == 2
"""

OLLAMA_NODE = """
import { Ollama } from "ollama";
const client = new Ollama({ host: process.env.OLLAMA_HOST });
const model = process.env.MODEL;
const content = "What is the capital of France? Answer in one sentence.";
const options = { temperature: 0, num_predict: 40 };
const asked = { model, messages: [{ role: "user", content }], options };
console.log((await client.chat(asked)).message.content);
for await (const part of await client.chat({ ...asked, stream: true }))
  process.stdout.write(part.message.content);
const first = await client.generate({ model, prompt: content, options });
const more = { model, prompt: "And of Spain?", context: first.context, options };
const second = await client.generate(more);
const total = first.prompt_eval_count + first.eval_count;
if (second.cached_tokens < total - 1) throw new Error(JSON.stringify(second));
if ((await client.list()).models[0].model !== model) throw new Error("not listed");
"""


@pytest.mark.parametrize("script", [OLLAMA_PYTHON, LANGCHAIN], ids=["ollama", "langchain-ollama"])
def test_python_clients(clients: Path, server: ServerProcess, tmp_path: Path, script: str) -> None:
    python = clients / "venv" / "bin" / "python"
    assert NEEDED_TEXT in run(server, tmp_path, str(python), "-c", script)


def test_ollama_for_node(clients: Path, server: ServerProcess, tmp_path: Path) -> None:
    script = clients / "ollama_client.mjs"  # beside the modules it imports
    script.write_text(OLLAMA_NODE)
    node = shutil.which("node") or "node"
    assert NEEDED_TEXT in run(server, tmp_path, node, str(script))


def test_llm_goes_on_with_its_conversation(
    clients: Path, server: ServerProcess, tmp_path: Path
) -> None:
    llm = str(clients / "venv" / "bin" / "llm")
    question = "What is the capital of France? Answer in one sentence."
    model = f"ollama/{STARTER_MODEL}"
    assert NEEDED_TEXT in run(
        server, tmp_path, llm, "-m", model, "-o", "temperature", "0", question
    )
    assert run(server, tmp_path, llm, "-c", "-o", "num_predict", "20", "And of Spain?")


def run(server: ServerProcess, home: Path, *command: str) -> str:
    environment = {
        "OLLAMA_HOST": server.url,
        "MODEL": STARTER_MODEL,
        "NO_PROXY": "*",
        "LLM_USER_PATH": str(home / "llm"),
    }
    done = run_client(command, home, environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
