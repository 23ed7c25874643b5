"""Serve your own model: any Hugging Face directory, or a tiny model that this example creates.

It starts a server of its own: python -m examples.custom_model [MODEL DIRECTORY]

Without a directory, the example creates a tiny model with random weights and the tokenizer of the
starter model.
"""

import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.client import call, say
from examples.persistence import server


def make_tiny_model(tokenizer_from: Path, directory: Path) -> Path:
    """Write a Llama with random weights and another model's tokenizer; it talks nonsense."""
    import torch  # noqa: PLC0415 - heavy, and only needed where no model is given
    from transformers import LlamaConfig, LlamaForCausalLM  # noqa: PLC0415

    source = json.loads((tokenizer_from / "config.json").read_text())
    config = LlamaConfig(
        vocab_size=source["vocab_size"],
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        bos_token_id=source.get("bos_token_id"),
        eos_token_id=source.get("eos_token_id"),
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(directory)
    for file in tokenizer_from.glob("*token*"):
        shutil.copy(file, directory)
    return directory


def starter_directory() -> Path:
    """Find the starter model, which is copied or downloaded the first time."""
    pull = [sys.executable, "-m", "semantic", "models", "pull", "starter", "--json"]
    done = subprocess.run(pull, stdout=subprocess.PIPE, check=True)  # noqa: S603
    return Path(json.loads(done.stdout)["directory"])


def main() -> None:
    """Run the example."""
    with tempfile.TemporaryDirectory() as scratch:
        home = Path(scratch) / "home"
        home.mkdir()
        tiny = Path(scratch) / "my-tiny-llama"
        given = sys.argv[1:]
        model = Path(given[0]) if given else make_tiny_model(starter_directory(), tiny)
        with server(home, "--model", str(model)) as http:
            served = call(http, "GET", "/v1/models")["data"][0]
            print("serving:", served["id"], "with a context of", served["max_context"])
            call(http, "POST", "/v1/agents", json={"id": "mine", "model": served["id"]})
            reply = say(http, "mine", "Hello!", max_tokens=8)
            print("reply:", repr(reply["text"]))
            again = say(http, "mine", "Once more.", max_tokens=8)
            print("reused:", again["usage"]["cached_tokens"], "tokens")


if __name__ == "__main__":
    main()
