"""Pages full of random characters, composed on the GPU: they teach the tower to read.

A picture of the questions has few characters, and drawing it takes milliseconds. A page has about
a hundred, and composing 256 pages from a table of glyphs takes a few milliseconds.
"""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - its usual name
from PIL import Image, ImageDraw

from training.pictures import SIZE, find_fonts, load_font
from training.vocabulary import CHARACTERS, CLASSES

_SIZES = (16, 18, 21, 24, 28, 34, 42, 52)
_PAGE = 256  # pixels a side, before a part of it is scaled to `SIZE`
_GLYPH = 64  # pixels a side of a glyph's cell
_BLANK = len(CHARACTERS)
FIRST_CHARACTER = CLASSES.index(CHARACTERS[0])
_LINES, _COLUMNS = 16, 40  # the most that a page can show
_LEAST_CONTRAST = 0.45


class Pages:
    """Makes batches of pages and the boxes of their characters."""

    def __init__(self, fonts: Path, device: str) -> None:
        paths = find_fonts(fonts)
        glyphs = np.zeros((len(paths), len(_SIZES), _BLANK + 1, _GLYPH, _GLYPH), np.uint8)
        advances = np.zeros(glyphs.shape[:3], np.float32)
        for i, path in enumerate(paths):
            for j, size in enumerate(_SIZES):
                font = load_font(path, size)
                advances[i, j, _BLANK] = size * 0.35
                for k, character in enumerate(CHARACTERS):
                    cell = Image.new("L", (_GLYPH, _GLYPH))
                    ImageDraw.Draw(cell).text((0, size), character, 255, font, anchor="ls")
                    glyphs[i, j, k] = np.asarray(cell)
                    advances[i, j, k] = font.getlength(character)
        self._glyphs = torch.from_numpy(glyphs).to(device)
        self._advances = torch.from_numpy(advances).to(device)
        self._sizes = torch.tensor(_SIZES, device=device)
        kinds = [0.25 / 10] * 10 + [0.5 / 26] * 26 + [0.25 / 26] * 26 + [0.2]
        self._chances = torch.tensor(kinds, device=device)
        self._device = device

    @torch.no_grad()
    def make(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return pages as the tower sees pictures, and marks as `train.Batches` gives them."""
        device = self._device

        def pick(high: int, *shape: int) -> torch.Tensor:
            return torch.randint(high, (count, *shape), device=device)

        def spread(low: float, high: float, *shape: int) -> torch.Tensor:
            return low + (high - low) * torch.rand((count, *shape), device=device)

        font, size = pick(len(self._glyphs)), pick(len(_SIZES))
        pixels = self._sizes[size]
        height = (pixels * spread(1.15, 1.8)).long()
        drawn = torch.multinomial(self._chances, count * _LINES * _COLUMNS, replacement=True)
        text = drawn.view(count, _LINES, _COLUMNS)
        text = torch.where(spread(0, 1, _LINES, 1) < 0.25, _BLANK, text)
        advance = self._advances[font[:, None, None], size[:, None, None], text]
        ends = (advance + spread(0, 1.5, 1, 1)).cumsum(-1)
        starts = F.pad(ends[..., :-1], (1, 0))
        shift = spread(0, 20, _LINES, 1)
        # Which character each pixel of a line shows, and where in its glyph.
        x = torch.arange(_PAGE, device=device) + shift
        index = torch.searchsorted(ends, x, right=True).clamp(max=_COLUMNS - 1)
        inside = (x - starts.gather(-1, index)).long().clamp(0, _GLYPH - 1)
        character = text.gather(-1, index)
        y = torch.arange(_PAGE, device=device) + pick(20, 1)
        line = (y // height[:, None]).clamp(max=_LINES - 1)
        down = (y - line * height[:, None]).clamp(max=_GLYPH - 1)
        rows = line[..., None].expand(-1, -1, _PAGE)
        alpha = self._glyphs[
            font[:, None, None],
            size[:, None, None],
            character.gather(1, rows),
            down[..., None].expand(-1, -1, _PAGE),
            inside.gather(1, rows),
        ]
        alpha = alpha * (down < height[:, None])[..., None]
        ink, paper = self._colours(count, line)
        page = paper + (ink - paper) * (alpha.float() / 255)[..., None]
        top = line.new_zeros(count, _LINES) + torch.arange(_LINES, device=device) * height[:, None]
        top = top - y[:, :1]
        marks = self._marks(text, (starts - shift, ends - shift), top, pixels)
        return self._scaled(page, marks)

    def _colours(self, count: int, line: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        paper = torch.rand((count, 1, 1, 3), device=self._device)
        paper = torch.where(torch.rand_like(paper[..., :1]) < 0.4, paper.round(), paper)
        ink = torch.rand((count, _LINES, 3), device=self._device)
        opposite = (paper[:, 0] < 0.5).float().expand_as(ink)
        far = (ink - paper[:, 0]).norm(dim=-1, keepdim=True) > _LEAST_CONTRAST
        ink = torch.where(far, ink, opposite)
        chosen = ink.gather(1, line[..., None].expand(-1, -1, 3))
        return chosen[:, :, None], paper

    def _marks(
        self,
        text: torch.Tensor,
        across: tuple[torch.Tensor, torch.Tensor],
        top: torch.Tensor,
        pixels: torch.Tensor,
    ) -> torch.Tensor:
        tops = top[..., None].expand_as(text).float()
        heights = pixels[:, None, None]
        low, high = tops + heights * 0.2, tops + heights * 1.04
        names = torch.where(text == _BLANK, -1, text + FIRST_CHARACTER).float()
        return torch.stack((across[0], low, across[1], high, names), -1).flatten(1, 2)

    def _scaled(self, page: torch.Tensor, marks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Scale a random part, noisy or not; each batch has one part."""
        width, height = (int(side) for side in torch.randint(150, _PAGE + 1, (2,)))
        part = page[:, :height, :width].permute(0, 3, 1, 2)
        part = F.interpolate(part, (SIZE, SIZE), mode="bilinear", antialias=True)
        noise = torch.rand((len(page), 1, 1, 1), device=self._device) * 0.07
        part = part + (torch.rand_like(part) - 0.5) * noise
        factors = (SIZE / width, SIZE / height, SIZE / width, SIZE / height, 1.0)
        scaled = marks * torch.tensor(factors, device=self._device)
        return (part.clamp(0, 1) * 255).byte().permute(0, 2, 3, 1), scaled
