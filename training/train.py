"""Trains the tower and connector: `python -m training.train --help`.

First the tower learns what is drawn where, from the auxiliary losses alone. Then conversations
about the pictures run through the frozen text model, and the loss is that of the answers.
"""

import argparse
import json
import math
import os
import random
import time
from collections import Counter, defaultdict
from functools import partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from training.network import Eyes, FrozenText, read_text_weights
from training.pages import FIRST_CHARACTER, Pages
from training.prompts import IGNORED, IMAGE_TOKEN_ID, Prompts
from training.questions import Example, make_example
from training.vocabulary import CHARACTERS, CLASSES

_MOST_MARKS = 64
_LENGTH = 176  # tokens of a conversation
Batch = dict[str, torch.Tensor]


class Batches(Dataset[Batch]):
    """Batch number n is always the same, however many processes draw."""

    def __init__(self, arguments: argparse.Namespace, first: int, size: int) -> None:
        self._arguments = arguments
        self._first, self._size = first, size
        self._prompts: Prompts | None = None

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> Batch:
        if index >= 10**9:
            raise IndexError(index)
        if self._prompts is None:
            self._prompts = Prompts(self._arguments.starter)
            torch.set_num_threads(1)
        start = (self._first + index) * self._size
        examples = [
            make_example(f"train/{start + i}", self._arguments.fonts, self._prompts.others)
            for i in range(self._size)
        ]
        rng = random.Random(f"prompt/{start}")  # noqa: S311 - not secrets
        written = [self._prompts.write(rng, one.questions, _LENGTH) for one in examples]
        marks = np.full((self._size, _MOST_MARKS, 5), -1, np.float32)
        for row, one in zip(marks, examples, strict=True):
            count = min(len(one.marks), _MOST_MARKS)
            row[:count] = one.marks[:count]
        return {
            "pictures": torch.from_numpy(np.stack([one.pixels for one in examples])),
            "marks": torch.from_numpy(marks),
            "ids": torch.tensor([ids for ids, _ in written]),
            "targets": torch.tensor([targets for _, targets in written]),
        }


class Auxiliary(nn.Module):
    """Predicts what is drawn in each patch, and in each image token by the words' embeddings."""

    def __init__(self, text: FrozenText, prompts: Prompts) -> None:
        super().__init__()
        self.patches = nn.Linear(256, len(CLASSES))
        self.scale = nn.Parameter(torch.tensor(3.0))
        self.bias = nn.Parameter(torch.full((len(CLASSES),), -4.0))
        nn.init.constant_(self.patches.bias, -4.0)
        words = text.embedding[[prompts.token_of(name) for name in CLASSES]].float()
        words = words - words.mean(0)
        self.words = nn.Buffer(F.normalize(words, dim=-1))

    def forward(
        self,
        features: torch.Tensor,
        tokens: torch.Tensor,
        marks: torch.Tensor,
        known: slice = slice(None),
    ) -> torch.Tensor:
        """The two losses, summed, over the classes that the marks show."""
        in_patches = self.patches(features.float())
        cosine = F.normalize(tokens.float(), dim=-1) @ self.words.T
        in_tokens = cosine * self.scale.exp() + self.bias
        pairs = (in_patches, _grid_labels(marks, 16)), (in_tokens, _grid_labels(marks, 8))
        return sum(_multilabel_loss(a[..., known], b[..., known]) for a, b in pairs)  # type: ignore[return-value]


def _multilabel_loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    losses = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return losses.sum(-1).mean()


def _grid_labels(marks: torch.Tensor, cells: int) -> torch.Tensor:
    """Which classes fill each of ``cells`` x ``cells`` parts: ``[batch, cells ** 2, classes]``."""
    side = 192 / cells
    starts = torch.arange(cells, device=marks.device) * side

    def overlap(low: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
        shared = torch.minimum(high[..., None], starts + side) - torch.maximum(
            low[..., None], starts
        )
        least = 0.35 * (high - low).clamp(max=side)
        return (shared > least[..., None]).float()

    columns = overlap(marks[..., 0], marks[..., 2])
    rows = overlap(marks[..., 1], marks[..., 3])
    names = F.one_hot(marks[..., 4].long().clamp(min=0), len(CLASSES)).float()
    names = names * (marks[..., 4:] >= 0)
    labels = torch.einsum("bny,bnx,bnc->byxc", rows, columns, names)
    return labels.clamp(max=1).flatten(1, 2)


class Trainer:
    """Holds the networks and the optimiser, and runs steps."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype = torch.bfloat16 if self.device == "cuda" else torch.float32
        torch.manual_seed(arguments.seed)
        torch.set_float32_matmul_precision("high")
        self.prompts = Prompts(arguments.starter)
        tensors = read_text_weights(arguments.weights or arguments.starter)
        self.text = FrozenText(tensors, self.dtype, self.device)
        self.eyes = Eyes().to(self.device)
        self._match_embeddings()
        if arguments.begin:
            self._load_exported(arguments.begin)
        self.auxiliary = Auxiliary(self.text, self.prompts).to(self.device)
        self.pages = Pages(arguments.fonts, self.device)
        if arguments.compile:
            self.text.run_layer = torch.compile(self.text.run_layer, dynamic=False)
            for layer in self.eyes.vision_model.encoder.layers:
                layer.compile(dynamic=False)
        parameters = [*self.eyes.parameters(), *self.auxiliary.parameters()]
        decayed = [one for one in parameters if one.ndim > 1]
        plain = [one for one in parameters if one.ndim <= 1]
        groups = [{"params": decayed, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=1e-3, betas=(0.9, 0.95), fused=self.device == "cuda"
        )
        self.parameters = parameters
        self.done = {"auxiliary": 0, "answers": 0}

    def _match_embeddings(self) -> None:
        """Let the connector start with outputs as large as the text model's embeddings."""
        size = self.text.embedding.float().pow(2).mean().sqrt().item()
        projection = self.eyes.connector.modality_projection.proj
        nn.init.normal_(projection.weight, std=size / math.sqrt(projection.in_features))

    def _load_exported(self, path: Path) -> None:
        tensors = {name.removeprefix("model."): one for name, one in load_file(path).items()}
        self.eyes.load_state_dict(tensors)

    def _see(self, pictures: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        with torch.autocast(self.device, torch.bfloat16, enabled=self.device == "cuda"):
            found: tuple[torch.Tensor, torch.Tensor] = self.eyes(pictures)
        return found

    def learn(self, loss: torch.Tensor, rate: float) -> None:
        """One step of the optimiser."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()

    def page_loss(self) -> torch.Tensor:
        """The auxiliary losses of a batch of pages."""
        pictures, marks = self.pages.make(self.arguments.batch)
        known = slice(FIRST_CHARACTER, FIRST_CHARACTER + len(CHARACTERS))
        return self.auxiliary(*self._see(pictures), marks, known)  # type: ignore[no-any-return]

    def losses(self, batch: Batch, *, with_answers: bool) -> dict[str, torch.Tensor]:
        """The losses of pictures with questions."""
        batch = {name: one.to(self.device, non_blocking=True) for name, one in batch.items()}
        features, tokens = self._see(batch["pictures"])
        found = {"auxiliary": self.auxiliary(features, tokens, batch["marks"])}
        if with_answers:
            logits, wanted = self.answer_logits(batch, tokens)
            found["answers"] = F.cross_entropy(logits.float(), wanted)
            found["right"] = (logits.argmax(-1) == wanted).float().mean()
        return found

    def answer_logits(
        self, batch: Batch, tokens: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits at the positions that predict an answer's token, and these tokens."""
        ids, targets = batch["ids"], batch["targets"]
        embeddings = F.embedding(ids, self.text.embedding)
        is_image = (ids == IMAGE_TOKEN_ID)[..., None]
        embeddings = embeddings.masked_scatter(is_image, tokens.to(embeddings.dtype))
        chosen = self.text.hidden(embeddings)[targets != IGNORED]
        return chosen @ self.text.embedding.T, targets[targets != IGNORED]

    def save(self, path: Path) -> None:
        """Write everything that is needed to continue."""
        state = {
            "eyes": self.eyes.state_dict(),
            "auxiliary": self.auxiliary.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "done": self.done,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(state, path.with_suffix(".new"))
        path.with_suffix(".new").replace(path)

    def load(self, path: Path) -> None:
        """Continue from a file of `save`."""
        state = torch.load(path, map_location=self.device, weights_only=True)
        self.eyes.load_state_dict(state["eyes"])
        self.auxiliary.load_state_dict(state["auxiliary"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.done = state["done"]

    def export(self, path: Path) -> None:
        """Write the tower and connector in float16, under transformers' names."""
        tensors = {
            f"model.{name}": one.detach().half().contiguous().cpu()
            for name, one in self.eyes.state_dict().items()
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path, metadata={"format": "pt"})

    @torch.no_grad()
    def accuracy(self, num_pictures: int, *, is_held_out: bool) -> dict[str, tuple[int, int]]:
        """Right answers and questions of each kind; right means that greedy decoding gives it."""
        right: dict[str, list[int]] = defaultdict(lambda: [0, 0])
        draw = partial(_held_out_example, self.arguments.fonts, is_held_out)
        with Pool(max(1, self.arguments.workers)) as pool:
            examples = pool.map(draw, range(num_pictures), chunksize=16)
        asked = [(one.pixels, question) for one in examples for question in one.questions]
        rng = random.Random("evaluation")  # noqa: S311 - not secrets
        for start in range(0, len(asked), 256):
            part = asked[start : start + 256]
            written = [self.prompts.write(rng, [question], _LENGTH) for _, question in part]
            pictures = torch.from_numpy(np.stack([pixels for pixels, _ in part])).to(self.device)
            ids = torch.tensor([ids for ids, _ in written], device=self.device)
            targets = torch.tensor([wanted for _, wanted in written], device=self.device)
            _, tokens = self._see(pictures)
            logits, wanted = self.answer_logits({"ids": ids, "targets": targets}, tokens)
            wrong_rows = (targets != IGNORED).nonzero()[:, 0][logits.argmax(-1) != wanted]
            wrong = set(wrong_rows.tolist())
            for row, (_, question) in enumerate(part):
                right[question.kind][0] += row not in wrong
                right[question.kind][1] += 1
        return {kind: (good, total) for kind, (good, total) in sorted(right.items())}


def _held_out_example(fonts: Path, is_held_out: bool, index: int) -> Example:
    return make_example(f"held out/{index}", fonts, is_held_out=is_held_out)


def run_stage(trainer: Trainer, stage: str, deadline: float) -> None:
    """Run a stage until its last step or the deadline."""
    arguments = trainer.arguments
    with_answers = stage == "answers"
    total = arguments.steps if with_answers else arguments.auxiliary_steps
    first = arguments.first + trainer.done[stage] + (10**6 if with_answers else 0)
    peak = arguments.rate if with_answers else 1e-3
    if trainer.done[stage] >= total:
        return
    loader = DataLoader(
        Batches(arguments, first, arguments.batch),
        batch_size=None,
        num_workers=arguments.workers,
        pin_memory=trainer.device == "cuda",
        prefetch_factor=4 if arguments.workers else None,
    )
    start = began = time.monotonic()
    shown = trainer.done[stage]
    sums: dict[str, Any] = defaultdict(float)
    counts: Counter[str] = Counter()
    for batch in loader:
        done = trainer.done[stage]
        if done >= total or time.monotonic() > deadline:
            break
        warm = min(1.0, (done + 1) / (200 if with_answers else 100))
        low = 0.02 if with_answers else 0.3
        progress = max(done / total, (time.monotonic() - start) / (deadline - start))
        rate = peak * warm * (low + (1 - low) * (1 + math.cos(math.pi * progress)) / 2)
        for _ in range(0 if with_answers else arguments.pages_between):
            trainer.learn(trainer.page_loss(), rate)
        losses = trainer.losses(batch, with_answers=with_answers)
        loss = losses["auxiliary"]
        if with_answers:
            loss = losses["answers"] + arguments.auxiliary_weight * loss
        if done % 2 == 0 or not with_answers:
            losses["pages"] = trainer.page_loss()
            loss = loss + (arguments.pages_weight if with_answers else 1) * losses["pages"]
        trainer.learn(loss, rate)
        for name, value in losses.items():
            sums[name] += value.detach()
            counts[name] += 1
        trainer.done[stage] = done + 1
        if (done + 1) % arguments.show == 0:
            count = done + 1 - shown
            values = " ".join(f"{name} {float(sums[name]) / counts[name]:.4f}" for name in sums)
            took = (time.monotonic() - began) / count
            print(f"{stage} {done + 1}/{total} {values} {1000 * took:.0f} ms/step", flush=True)
            began, shown = time.monotonic(), done + 1
            sums.clear()
            counts.clear()
    del loader


def main() -> None:
    """Train, write the weights, and print the accuracy by kind of question."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starter", type=Path, required=True, help="imported starter model")
    parser.add_argument("--weights", type=Path, help="its weights, if in another directory")
    parser.add_argument("--fonts", type=Path, required=True, help="DejaVu and Liberation fonts")
    parser.add_argument("--state", type=Path, default=Path("build/training/state.pt"))
    parser.add_argument("--out", type=Path, default=Path("build/training/eyes.safetensors"))
    parser.add_argument("--begin", type=Path, help="weights of an earlier run to begin with")
    parser.add_argument("--first", type=int, default=0, help="number of the first batch")
    parser.add_argument("--pages-between", type=int, default=2, help="steps with pages alone")
    parser.add_argument("--seed", type=int, default=41)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=5000, help="steps with answers")
    parser.add_argument("--auxiliary-steps", type=int, default=450)
    parser.add_argument("--auxiliary-weight", type=float, default=0.1)
    parser.add_argument("--pages-weight", type=float, default=0.03)
    parser.add_argument("--rate", type=float, default=7e-4)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop and save after this time")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--pictures", type=int, default=2000, help="held-out pictures to ask about")
    parser.add_argument("--show", type=int, default=100, help="steps between two lines of output")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.seconds
    trainer = Trainer(arguments)
    if arguments.state.exists():
        trainer.load(arguments.state)
    for stage in ("auxiliary", "answers"):
        run_stage(trainer, stage, deadline)
    trainer.save(arguments.state)
    trainer.export(arguments.out)
    report = {}
    for name, is_held_out in (("trained wordings", False), ("unseen wordings", True)):
        with torch.compiler.set_stance("force_eager"):  # not worth compiling
            num_pictures = arguments.pictures // (2 if is_held_out else 1)
            found = trainer.accuracy(num_pictures, is_held_out=is_held_out)
        good, total = (sum(pair[i] for pair in found.values()) for i in (0, 1))
        print(f"{name}: {good / max(1, total):.1%} of {total}")
        for kind, (right, asked) in found.items():
            print(f"  {kind:12} {right / asked:.1%} of {asked}")
        report[name] = found
    arguments.out.with_suffix(".json").write_text(json.dumps({"done": trainer.done, **report}))


if __name__ == "__main__":
    main()
