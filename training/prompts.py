"""Writes conversations about a picture as token ids, in the starter's chat template."""

import random
from collections.abc import Sequence
from pathlib import Path

from tokenizers import Tokenizer

from training.questions import Question

NUM_IMAGE_TOKENS = 64
# Reserved tokens of the starter's vocabulary that its chats never use, and their new names.
IMAGE_TOKEN, AROUND_IMAGE, GLOBAL_IMAGE = "<empty_output>", "<jupyter_start>", "<jupyter_output>"
IMAGE_TOKEN_ID = 16
IMAGE = f"{AROUND_IMAGE}{GLOBAL_IMAGE}{IMAGE_TOKEN * NUM_IMAGE_TOKENS}{AROUND_IMAGE}"
_DEFAULT_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
_SYSTEMS = (
    "You are a helpful assistant.",
    "You answer questions about pictures.",
    "Answer briefly.",
    "You are an agent that looks at screenshots.",
)
IGNORED = -100


class Prompts:
    """Encodes conversations with the starter's tokenizer."""

    def __init__(self, starter: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(starter / "tokenizer.json"))
        vocabulary = self._tokenizer.get_vocab()
        self.others = tuple(
            word[1:]
            for word, index in sorted(vocabulary.items())
            if index < 9000 and word[0] == "Ġ" and word[1:].isascii() and word[1:].islower()
            if word[1:].isalpha() and 3 <= len(word) - 1 <= 8
        )
        self.end: int = vocabulary["<|im_end|>"]

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, which may contain special tokens."""
        ids: list[int] = self._tokenizer.encode(text).ids
        return ids

    def token_of(self, name: str) -> int:
        """The first token of a name, as it stands in a sentence."""
        return self.encode(name if len(name) == 1 else f" {name.partition(' ')[0]}")[0]

    def write(
        self, rng: random.Random, questions: Sequence[Question], length: int
    ) -> tuple[list[int], list[int]]:
        """Token ids of a conversation and its targets; turns that do not fit are left out.

        A target is the token to predict at a position, or `IGNORED`.
        """
        system = _DEFAULT_SYSTEM if rng.random() < 0.7 else rng.choice(_SYSTEMS)
        ids = self.encode(f"<|im_start|>system\n{system}<|im_end|>\n")
        targets = [IGNORED] * len(ids)
        for index, question in enumerate(questions):
            asked = question.text
            if index == 0:
                asked = IMAGE + asked if rng.random() < 0.65 else asked + IMAGE
            prompt = self.encode(f"<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n")
            answer = self.encode(f"{question.answer}<|im_end|>")
            if len(ids) + len(prompt) + len(answer) + 1 > length:
                break
            ids += prompt + answer
            targets += [IGNORED] * (len(prompt) - 1) + answer + [IGNORED]
            newline = self.encode("\n")
            ids += newline
            targets += [IGNORED] * len(newline)
        pad = length - len(ids)
        return ids + [self.end] * pad, targets + [IGNORED] * pad
