"""Makes the GGUF files of `gguf_models.py` with llama.cpp's own converter.

    python -m tests.contract.convert_gguf_models SOURCE [NAME ...]

SOURCE is a source tree of llama.cpp, as the source package of llama-cpp-python contains one. The
vocabulary is made up, because the converter only knows those of published models.
"""

import importlib
import json
import lzma
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

SPECIAL = ["<s>", "</s>", "<pad>"]
WORDS = ["a", "b", "c", "d", "e", "Ġ", "ab", "abc", "de", "Ġab"]
TOKENS = [*SPECIAL, *WORDS, *(f"<x{i}>" for i in range(64 - len(SPECIAL) - len(WORDS)))]
MERGES = [("a", "b"), ("ab", "c"), ("d", "e"), ("Ġ", "ab")]


def write_tokenizer(directory: Path) -> None:
    tokenizer = Tokenizer(BPE({word: i for i, word in enumerate(TOKENS)}, MERGES))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.save(str(directory / "tokenizer.json"))
    names = dict(zip(("bos_token", "eos_token", "pad_token"), SPECIAL, strict=True))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages }}"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config | names))


def convert(models: Any, name: str, directory: Path) -> bytes:
    """Save a model as transformers does, let llama.cpp convert it, and return the file."""
    conversion, base = (importlib.import_module(f"conversion{end}") for end in ("", ".base"))
    spec = models.MODELS[name]
    models.build(name).save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text()) | spec.get("patch", {})
    config = {key: value for key, value in config.items() if key not in spec.get("drop", ())}
    (directory / "config.json").write_text(json.dumps(config))
    write_tokenizer(directory)
    hparams = base.ModelBase.load_hparams(directory, False)
    architecture = base.get_model_architecture(hparams, base.ModelType.TEXT)
    published = conversion.get_model_class(architecture)
    converter: Any = type(
        published.__name__,
        (published,),
        {
            "model_arch": published.model_arch,
            "set_vocab": lambda self: self._set_vocab_gpt2(),
            "no_mtp": spec.get("no_mtp", published.no_mtp),
        },
    )
    base.TextModel.get_vocab_base_pre = lambda _self, _tokenizer: "qwen2"
    target = directory / "model.gguf"
    with torch.inference_mode():
        made = converter(directory, base.gguf.LlamaFileType.MOSTLY_BF16, target)
        if (inner := getattr(made, "impl", None)) is not None:
            type(inner).set_vocab = converter.set_vocab
        made.write()
    return target.read_bytes()


def main(source: str, *names: str) -> None:
    sys.path[:0] = [source, f"{source}/gguf-py"]  # before the installed gguf is imported
    models: Any = importlib.import_module("tests.contract.gguf_models")
    transformers: Any = importlib.import_module("transformers")
    fast = transformers.PreTrainedTokenizerFast  # in place of those of published models
    transformers.AutoTokenizer.from_pretrained = lambda path, **_: fast.from_pretrained(path)
    for name in names or models.MODELS:
        with tempfile.TemporaryDirectory() as scratch:
            directory = Path(scratch, name)
            directory.mkdir()
            content = convert(models, name, directory)
        packed = lzma.compress(content, preset=9 | lzma.PRESET_EXTREME)
        (models.FILES / f"{name}.gguf.xz").write_bytes(packed)


if __name__ == "__main__":
    main(*sys.argv[1:])
