"""Records agents on one kind of machine, so that tests continue them on another.

`make record-machine` writes `tests/recordings/machines/<kind>.json` and an archive of an agent for
each kind of weights. The model of the archives is tiny, and its weights are the same on every
machine: they come from NumPy's integers, not from a library whose vectors round differently. The
starter model answers questions too; its KV cache would be too large to keep in the repository.
"""

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from safetensors.numpy import save_file

from benchmarks.report import environment
from semantic.adapters.config.settings import STARTER_MODEL
from semantic.adapters.outbound.models.source import LocalModelSource
from tests.http_server import make_settings, run_server

RECORDINGS = Path(__file__).with_name("recordings") / "machines"
WEIGHTS = ("int8", "int4")
# Signs the archives. Everybody knows it, so it proves nothing; only these tests trust it.
KEY = "7e57" * 16
TURNS = ("Say something.", "Say it again, please.", "And once more, for another machine.")
QUESTIONS = (
    "What is the capital of France? Answer in one sentence.",
    "Name three animals that live in the sea, and say how they breathe.",
    "Write a Python function that reverses a string.",
)
NUM_TOKENS = 32
_HIDDEN, _LAYERS, _HEADS, _KV_HEADS, _INNER = 128, 2, 4, 2, 256


def machine_kind() -> str:
    """What recordings are told apart by: the architecture."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def make_model(tokenizer_from: Path, directory: Path) -> Path:
    """Write a small Llama with another model's tokenizer and weights that are exactly known."""
    source = json.loads((tokenizer_from / "config.json").read_text())
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float16",
        "vocab_size": source["vocab_size"],
        "hidden_size": _HIDDEN,
        "intermediate_size": _INNER,
        "num_hidden_layers": _LAYERS,
        "num_attention_heads": _HEADS,
        "num_key_value_heads": _KV_HEADS,
        "max_position_embeddings": 1024,
        "bos_token_id": source["bos_token_id"],
        "eos_token_id": source["eos_token_id"],
        "tie_word_embeddings": False,
    }
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    tensors = dict(_tensors(source["vocab_size"]))
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    for file in sorted(tokenizer_from.glob("*token*")):
        shutil.copy(file, directory)
    return directory


def _tensors(vocabulary: int) -> Iterator[tuple[str, Any]]:
    generator = np.random.default_rng(2)
    key_size = _HIDDEN // _HEADS * _KV_HEADS

    def uniform(*shape: int) -> Any:
        """Multiples of 2^-10 up to 1/4 in size, which are exact in float16."""
        return (generator.integers(-256, 257, shape) / 1024).astype(np.float16)

    ones = np.ones(_HIDDEN, np.float16)
    yield "model.embed_tokens.weight", uniform(vocabulary, _HIDDEN)
    yield "lm_head.weight", uniform(vocabulary, _HIDDEN)
    yield "model.norm.weight", ones
    for layer in range(_LAYERS):
        name = f"model.layers.{layer}"
        yield f"{name}.input_layernorm.weight", ones
        yield f"{name}.post_attention_layernorm.weight", ones
        for part, rows in (("q", _HIDDEN), ("k", key_size), ("v", key_size), ("o", _HIDDEN)):
            yield f"{name}.self_attn.{part}_proj.weight", uniform(rows, _HIDDEN)
        yield f"{name}.mlp.gate_proj.weight", uniform(_INNER, _HIDDEN)
        yield f"{name}.mlp.up_proj.weight", uniform(_INNER, _HIDDEN)
        yield f"{name}.mlp.down_proj.weight", uniform(_HIDDEN, _INNER)


@contextmanager
def serving(home: Path, model: Path, weights: str, native: str = "auto") -> Iterator[httpx.Client]:
    """Serve a model with quantised weights by the native library, in float32."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "export.key").write_text(KEY)
    given = {"backend": "torch", "model": str(model), "weights": weights, "native": native}
    settings = make_settings(home, device="cpu", log_level="error", **given)
    with run_server(settings) as server, server.client() as http:
        compute = http.get("/health").json()["compute"]
        assert compute["dtype"] == "float32", compute
        assert "native" in compute["kernels"], compute
        yield http


def say(http: httpx.Client, message: str) -> dict[str, Any]:
    """One turn of the agent, greedy."""
    body = {"message": message, "temperature": 0, "max_tokens": NUM_TOKENS}
    found: dict[str, Any] = http.post("/v1/agents/a/generate", json=body).raise_for_status().json()
    return found


def replies(http: httpx.Client, messages: tuple[str, ...] = TURNS) -> list[str]:
    """Make the agent, and return its replies."""
    http.post("/v1/agents", json={"id": "a", "system": "You talk."}).raise_for_status()
    return [say(http, message)["text"] for message in messages]


def answers(http: httpx.Client) -> list[str]:
    """What the model says to each question alone."""
    found = []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {"messages": messages, "temperature": 0, "max_tokens": NUM_TOKENS}
        reply = http.post("/v1/chat/completions", json=body).raise_for_status().json()
        found.append(reply["choices"][0]["message"]["content"])
    return found


def record(starter: Path, scratch: Path, target: Path) -> Path:
    """Write a recording of this machine; returns its file."""
    target.mkdir(parents=True, exist_ok=True)
    kind, found = machine_kind(), dict[str, list[str]]()
    model = make_model(starter, scratch / "tiny")
    for weights in WEIGHTS:
        with serving(scratch / weights, model, weights) as http:
            said = replies(http, TURNS[:-1])
            archive = http.get("/v1/agents/a/export").raise_for_status().content
            (target / f"{kind}-{weights}.tar").write_bytes(archive)
            found[weights] = [*said, say(http, TURNS[-1])["text"]]
    with serving(scratch / "starter", starter, "auto") as http:
        found["starter"] = answers(http)
    file = target / f"{kind}.json"
    file.write_text(json.dumps({"environment": environment(), **found}, indent=1) + "\n")
    return file


def main() -> int:
    """Record this machine."""
    with tempfile.TemporaryDirectory() as scratch:
        source = LocalModelSource(Path(scratch) / "models", STARTER_MODEL)
        starter = source.resolve(STARTER_MODEL, lambda _: None)
        file = record(starter, Path(scratch), RECORDINGS)
    sys.stdout.write(f"recorded {file} and an archive for each of {', '.join(WEIGHTS)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
