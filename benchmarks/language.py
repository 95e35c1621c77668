"""A task that is on every machine: the next character of the documentation of Python's library."""

from __future__ import annotations

import ast
import sysconfig
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn

__all__ = ["Corpus", "Language", "corpus"]

_CODES = 128
_HELD_OUT = 20  # a part of so many is for validation


class Corpus:
    """Text as numbers below 128.

    Args:
        text: Any; other characters than ASCII's are left out.
    """

    def __init__(self, text: str) -> None:
        codes = torch.frombuffer(bytearray(text.encode("ascii", "ignore")), dtype=torch.uint8)
        cut = len(codes) - len(codes) // _HELD_OUT
        self._train, self._held_out = codes[:cut], codes[cut:]

    def batch(self, generator: torch.Generator, size: int, length: int) -> Tensor:
        """Random passages for training, a row each, of one character more than `length`."""
        return _passages(self._train, generator, size, length)

    def held_out(self, size: int, length: int) -> Tensor:
        """Passages for validation, always the same."""
        return _passages(self._held_out, torch.Generator().manual_seed(0), size, length)


def _passages(codes: Tensor, generator: torch.Generator, size: int, length: int) -> Tensor:
    starts = torch.randint(len(codes) - length, (size, 1), generator=generator)
    return codes[starts + torch.arange(length + 1)].long()


@cache
def corpus() -> Corpus:
    """The documentation strings of this Python's library, in the order of its files."""
    library = Path(sysconfig.get_path("stdlib"))
    texts: list[str] = []
    for path in sorted([*library.glob("*.py"), *library.glob("[a-s]*/*.py")]):
        if path.parent.name not in ("site-packages", "idlelib"):
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
            nodes = (node for node in ast.walk(tree) if isinstance(node, _HOLDERS))
            texts += filter(None, map(ast.get_docstring, nodes))
    return Corpus("\n\n".join(texts))


_HOLDERS = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Language(nn.Module):
    """A transformer over characters, of 1.8 million parameters.

    Args:
        layers: Number of layers.
        width: Width of a layer; a multiple of 4.
        length: The longest passage.
    """

    def __init__(self, layers: int = 4, width: int = 192, length: int = 64) -> None:
        super().__init__()
        self.codes, self.places = nn.Embedding(_CODES, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, _CODES)

    def forward(self, passages: Tensor) -> Tensor:
        """The mean loss of predicting each passage's characters from those before, in nats."""
        known, next_ = passages[:, :-1], passages[:, 1:]
        length = known.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length)
        x = self.codes(known) + self.places.weight[:length]
        scores = self.head(self.layers(x, mask=mask, is_causal=True))
        return nn.functional.cross_entropy(scores.flatten(0, 1), next_.flatten())
