"""What transformers itself makes of a prompt with images: the reference of all comparisons."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import transformers

from semantic.adapters.images.files import open_rgb
from tests.contract.seeing_models import SeeingTinyModel


def _processor(model: SeeingTinyModel) -> Any:
    """Return the processor of transformers, with Pillow's image processor."""
    from transformers import PreTrainedTokenizerFast

    names = {"qwen2_5_vl": "Qwen2VL", "qwen3_vl": "Qwen2VL", "gemma3": "Gemma3"}
    names |= {"smolvlm": "SmolVLM", "idefics3": "Idefics3"}
    kind = getattr(transformers, f"{names[model.family]}ImageProcessorPil")
    images = kind.from_pretrained(model.directory)
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_file=str(model.directory / "tokenizer.json"),
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        }
        if model.family == "gemma3"
        else {},
    )
    if model.family == "gemma3":
        return transformers.Gemma3Processor(images, tokenizer, image_seq_length=9)
    if model.family in ("idefics3", "smolvlm"):  # SmolVLM's needs a package, for videos
        return transformers.Idefics3Processor(images, tokenizer, image_seq_len=4)
    return partial(_qwen_inputs, images, tokenizer)


def _qwen_inputs(
    processor: Any, tokenizer: Any, text: list[str], images: list[list[Any]], return_tensors: str
) -> Any:
    """Do what Qwen's processors do, which need a package for videos."""
    inputs = processor([image for each in images for image in each], return_tensors=return_tensors)
    [written] = text
    for number in (inputs["image_grid_thw"].prod(dim=1) // 4).tolist():
        written = written.replace("<|image_pad|>", "<placeholder>" * number, 1)
    written = written.replace("<placeholder>", "<|image_pad|>")
    inputs |= tokenizer([written], return_tensors=return_tensors)
    image_id = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    return {**inputs, "mm_token_type_ids": (inputs["input_ids"] == image_id).int()}


def inputs_of(model: SeeingTinyModel, text: str, images: Sequence[bytes]) -> Any:
    """Return what the library's processor makes of a prompt."""
    written = text.format(*[model.library_marker] * len(images))
    return _processor(model)(
        text=[written], images=[[open_rgb(data) for data in images]], return_tensors="pt"
    )


def library_reply(
    model: SeeingTinyModel, text: str, images: Sequence[bytes], num_reply: int
) -> list[int]:
    library: Any = transformers.AutoModelForImageTextToText.from_pretrained(
        model.directory, dtype=torch.float32, attn_implementation="eager"
    )
    inputs = inputs_of(model, text, images)
    with torch.inference_mode():
        whole = library.eval().generate(
            **inputs, max_new_tokens=num_reply, do_sample=False, eos_token_id=None
        )
    reply: list[int] = whole[0, inputs["input_ids"].shape[1] :].tolist()
    return reply
