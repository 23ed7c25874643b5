"""Builds the model directory of `starter-vision` from the starter model and the vision tower.

The weights of the starter stay as they are, byte for byte. Four reserved tokens, which no chat of
the starter uses, get the names that Idefics3 has for the parts of an image.
"""

import contextlib
import hashlib
import json
import shutil
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from semantic.adapters.outbound.models.generation_config import GENERATION_CONFIG
from semantic.adapters.outbound.models.gguf.importing import scratch_directory
from semantic.domain.errors import InvalidRequestError

STARTER_VISION = "starter-vision"
_HERE = Path(__file__).parent
_TOWER = _HERE / "tower.safetensors"
_COPIED = ("chat_template.jinja", "preprocessor_config.json", "processor_config.json")
_WEIGHTS = "model.safetensors"
_MARK, _VERSION = ".built", 1  # an up-to-date directory's mark identifies what it was built from
_RENAMED = {
    "<jupyter_start>": "<fake_token_around_image>",
    "<jupyter_output>": "<global-img>",
    "<jupyter_script>": "<end_of_utterance>",
    "<empty_output>": "<image>",
}
_HIDDEN = 576  # width of the embeddings that the tower was trained for
# Of the starter's config, these concern the whole model.
_OUTER = ("dtype", "torch_dtype", "quantization", "bos_token_id", "eos_token_id", "pad_token_id")


def has_tower() -> bool:
    """Whether the tower's weights are here: a checkout has them, a wheel does not."""
    return _TOWER.is_file()


def is_other_model(target: Path) -> bool:
    """Whether ``target`` exists and was not built by this module."""
    return target.exists() and not (target / _MARK).is_file()


def is_built(starter: Path, target: Path) -> bool:
    """Whether ``target`` has the model as this version builds it from the files of ``starter``."""
    try:
        return (target / _MARK).read_text("utf-8") == _mark(starter)
    except OSError:
        return False


def build_starter_vision(starter: Path, target: Path) -> Path:
    """Build the model directory ``target``, which appears atomically; returns its path.

    Args:
        starter: The directory of the imported starter model.

    Raises:
        InvalidRequestError: the tower's weights are not here, ``target`` is a directory that this
            function did not make, or the starter's files are not as expected.
        OSError: the directory cannot be written.
    """
    if not has_tower():
        raise InvalidRequestError(
            f"{STARTER_VISION} needs a checkout of this project: its vision tower is a "
            "demonstration and not part of the package. docs/images.md lists other models.",
            param="model",
        )
    if is_built(starter, target):
        return target
    if is_other_model(target):
        raise InvalidRequestError(
            f"{target} exists and was not built from the starter model; move or rename it.",
            param="model",
        )
    with scratch_directory(target) as built:
        _write_files(starter, built)
        if target.exists():
            target.rename(built.with_name("outdated"))
        try:
            built.rename(target)
        except OSError:
            if not is_built(starter, target):  # another process has just built it
                raise
    return target


def _mark(starter: Path) -> str:
    small = b"".join((_HERE / name).read_bytes() for name in (*_COPIED, "config.json"))
    sizes = f"{(starter / _WEIGHTS).stat().st_size} {_TOWER.stat().st_size}"
    return f"{_VERSION} {sizes} {hashlib.sha256(small).hexdigest()}\n"


def _write_files(starter: Path, built: Path) -> None:
    for name in _COPIED:
        shutil.copyfile(_HERE / name, built / name)
    with contextlib.suppress(FileNotFoundError):
        shutil.copyfile(starter / GENERATION_CONFIG, built / GENERATION_CONFIG)
    text = _read(starter / "config.json")
    if text.get("hidden_size") != _HIDDEN or not (starter / _WEIGHTS).is_file():
        raise InvalidRequestError(
            f"{starter} is not the imported starter model, which {STARTER_VISION} is built from; "
            "move or rename it.",
            param="model",
        )
    outer = {name: text.pop(name) for name in _OUTER if name in text}
    _write(built / "config.json", _read(_HERE / "config.json") | outer | {"text_config": text})
    settings = _read(starter / "tokenizer_config.json")
    settings.pop("chat_template", None)  # the file `chat_template.jinja` has it
    _write(built / "tokenizer_config.json", settings)
    _write(built / "tokenizer.json", _renamed_tokens(_read(starter / "tokenizer.json")))
    _join_weights(starter / _WEIGHTS, built / _WEIGHTS)
    (built / _MARK).write_text(_mark(starter), "utf-8")


def _renamed_tokens(tokenizer: dict[str, Any]) -> dict[str, Any]:
    vocabulary = tokenizer["model"]["vocab"]
    if missing := _RENAMED.keys() - vocabulary.keys():
        raise InvalidRequestError(
            f"the starter model's tokenizer has no token {min(missing)}; import the model again.",
            param="model",
        )
    new = {_RENAMED.get(token, token): index for token, index in vocabulary.items()}
    added = [
        {**token, "content": _RENAMED.get(token["content"], token["content"])}
        for token in tokenizer["added_tokens"]
    ]
    return {**tokenizer, "model": {**tokenizer["model"], "vocab": new}, "added_tokens": added}


def _join_weights(text: Path, target: Path) -> None:
    """Write both files' tensors into one, with the starter's under Idefics3's names."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    starts, end = [], 0
    for path in (text, _TOWER):
        tensors, data_start = _read_header(path)
        for name, tensor in tensors.items():
            whole = name.replace("model.", "model.text_model.", 1) if path == text else name
            first, last = tensor["data_offsets"]
            header[whole] = {**tensor, "data_offsets": [first + end, last + end]}
        starts.append(data_start)
        end += path.stat().st_size - data_start
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    with target.open("wb") as sink:
        sink.write(struct.pack("<Q", len(encoded)) + encoded)
        for path, data_start in zip((text, _TOWER), starts, strict=True):
            with path.open("rb") as source:
                source.seek(data_start)
                shutil.copyfileobj(source, sink, 2**20)


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the names and places of a safetensors file's tensors, and where its data starts."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        tensors: dict[str, Any] = json.loads(file.read(length))
    tensors.pop("__metadata__", None)
    return tensors, 8 + length


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text("utf-8"))
    return content


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=None) + "\n", "utf-8")
