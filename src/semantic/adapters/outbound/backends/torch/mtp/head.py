"""The head of a model for draft tokens (multi-token prediction, MTP).

Entry `j` of a head takes the hidden state of position `j` after the model's last norm, and the
embedding of token `j + 1`; it predicts token `j + 2`. Both are normed and projected to one vector,
which passes a decoder layer with its own keys and values, a norm, and the model's output layer. For
the tokens after that the head runs on its own outputs.

transformers drops the weights of heads. Here the head's layer is read as one more layer of the
model, in all formats that transformers reads, and then taken out of it.
"""

import copy
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from torch.nn import functional

from semantic.adapters.outbound.backends.sampler import sample
from semantic.adapters.outbound.backends.torch.mtp.names import HeadNames
from semantic.adapters.outbound.backends.torch.mtp.state import HeadState
from semantic.ports.backend import Draw


@dataclass(slots=True)
class HeadRow:
    """A sequence to draft for.

    Attributes:
        known: All tokens; the last one is not computed yet.
    """

    state: HeadState
    known: list[int]
    draw: Draw


class TorchHead(nn.Module):
    """The modules of a head; see the module's description."""

    def __init__(self, model: Any, directory: Path, names: HeadNames) -> None:
        """Take the last layer of a model, which was read as one more, out of it."""
        super().__init__()
        base = model.base_model
        self.layer = base.layers[-1]
        base.layers = base.layers[:-1]
        # Its attention is that of the library, whatever the model's own layers use.
        config = copy.deepcopy(model.config)
        config._attn_implementation = "sdpa"
        self.layer.self_attn.config = config
        model.config.num_hidden_layers -= 1
        first, second, pair, last = _read(directory, astuple(names))
        self.embedding_norm, self.hidden_norm, self.norm = (
            _norm(base.norm, weight) for weight in (first, second, last)
        )
        dtype = base.norm.weight.dtype
        size, both = pair.shape
        self.projection = nn.Linear(both, size, bias=False, device="meta")
        self.projection.weight = nn.Parameter(pair.to(dtype), requires_grad=False)
        self._shared = (model,)  # in a tuple, so that the model is no part of this module
        self.eval()

    @torch.inference_mode()
    def draft(self, rows: Sequence[HeadRow], count: int) -> list[tuple[int, ...]]:
        """Draft `count` tokens for each row; its state gets entries up to its last token."""
        batch = _Batch([row.state for row in rows])
        starts = [len(row.known) for row in rows]
        tokens = batch.padded([torch.tensor(row.known[-row.state.num_hidden :]) for row in rows])
        hidden = batch.padded([row.state.hidden for row in rows])
        ends = torch.tensor(starts)[:, None] - 1
        positions = ends + torch.arange(-batch.num_new, 0)
        for number in range(count):
            output = self._run(tokens, hidden, positions.clamp(min=0), batch)
            if not number:
                batch.keep_new()
            drawn = self._sample(output[:, -1], rows)
            tokens = torch.tensor(drawn)[:, None]
            hidden, positions = output[:, -1:], ends + number
        return [tuple(row.known[start:]) for row, start in zip(rows, starts, strict=True)]

    def _run(
        self, tokens: torch.Tensor, hidden: torch.Tensor, positions: torch.Tensor, batch: "_Batch"
    ) -> torch.Tensor:
        base = self._shared[0].base_model
        pair = (self.embedding_norm(base.embed_tokens(tokens)), self.hidden_norm(hidden))
        entries = self.projection(torch.cat(pair, dim=-1))
        output = self.layer(
            entries,
            position_embeddings=base.rotary_emb(entries, positions),
            position_ids=positions,
            attention_mask=batch.mask(tokens.shape[1]),
            past_key_values=batch,
        )
        normed: torch.Tensor = self.norm(output[0] if isinstance(output, tuple) else output)
        return normed

    def _sample(self, hidden: torch.Tensor, rows: Sequence[HeadRow]) -> list[int]:
        logits = self._shared[0].get_output_embeddings()(hidden).float().cpu().numpy()
        for row, scores in zip(rows, logits, strict=True):
            row.known.append(sample(scores, row.draw, row.known)[0])
        return [row.known[-1] for row in rows]


def _read(directory: Path, wanted: Sequence[str]) -> list[torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            found |= {name: file.get_tensor(name) for name in {*wanted} & {*file.keys()}}
    return [found[name] for name in wanted]


def _norm(like: Any, weight: torch.Tensor) -> Any:
    norm = copy.deepcopy(like)
    norm.weight = nn.Parameter(weight.to(like.weight.dtype), requires_grad=False)
    return norm


class _Batch:
    """Keys and values of several rows, padded on the left, as a cache of the library.

    Attributes:
        num_new: The most new entries of a row in the first pass.
    """

    def __init__(self, states: Sequence[HeadState]) -> None:
        self._states = states
        self._held = [state.num_entries for state in states]
        self._new = [state.num_hidden for state in states]
        self.num_new = max(self._new)
        self._longest = max(self._held)
        self._pair: tuple[torch.Tensor, torch.Tensor] | None = None
        some = next((state.pair for state in states if state.pair is not None), None)
        if some is not None:
            pairs = [state.pair or tuple(part[:, :0] for part in some) for state in states]
            keys, values = (
                torch.stack([_pad(part, self._longest, axis=1) for part in parts])
                for parts in zip(*pairs, strict=True)
            )
            self._pair = keys, values

    def padded(self, rows: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([_pad(row, self.num_new, axis=0) for row in rows])

    def mask(self, num_queries: int) -> torch.Tensor:
        """Return which entries the next ones attend to, as ``[rows, 1, queries, entries]``."""
        done = 0 if self._pair is None else self._pair[0].shape[2]
        places = torch.arange(done + num_queries)
        queries = places[done:, None]
        held, new = (torch.tensor(n)[:, None] for n in (self._held, self._new))
        is_old = places < self._longest
        is_held = torch.where(is_old, places >= self._longest - held, True)
        is_new = torch.where(is_old, True, places - self._longest >= self.num_new - new)
        is_seen = (places <= queries)[None] & (is_held & is_new)[:, None]
        # Padding attends to itself, because the attention to nothing is undefined.
        return (is_seen | (places == queries)[None])[:, None]

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if self._pair is not None:
            keys, values = (
                torch.cat(both, dim=2) for both in zip(self._pair, (keys, values), strict=True)
            )
        self._pair = keys, values
        return self._pair

    def get_seq_length(self, *_args: Any) -> int:
        return 0 if self._pair is None else self._pair[0].shape[2]

    def keep_new(self) -> None:
        """Let the states have the entries of the first pass."""
        if self._pair is None:
            raise RuntimeError("the head's layer keeps no keys and values")
        for index, (state, count) in enumerate(zip(self._states, self._new, strict=True)):
            keys, values = (part[index, :, -count:] for part in self._pair)
            state.keep(keys, values)


def _pad(tensor: torch.Tensor, size: int, axis: int) -> torch.Tensor:
    missing = size - tensor.shape[axis]
    if not missing:
        return tensor
    return functional.pad(tensor, (*((0, 0) * (tensor.ndim - 1 - axis)), missing, 0))
