"""The networks whose training step is measured, small enough for one thread per rank.

Their batches are chosen so that on two ranks with one thread each, torch's communication is
between a fifth and a half of the step: with less, nothing of it would show in the step; with
more, the step would be nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["Gpt", "linear_layers", "mlp", "resnet", "transformer"]


def linear_layers(layers: int = 200, width: int = 64) -> nn.Module:
    """Many small parameters: what each one costs in Python would show here."""
    linears = [nn.Linear(width, width) for _ in range(layers)]
    for linear in linears:  # without this, 200 layers would shrink gradients to denormal numbers
        nn.init.orthogonal_(linear.weight)
    return nn.Sequential(*linears)


def mlp(layers: int = 6, width: int = 1024) -> nn.Module:
    """Few large parameters: what moving their bytes costs."""
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(layers))
    )


def transformer(layers: int = 6, width: int = 256) -> nn.Module:
    """An encoder without dropout, for sequences of width-long vectors: a mixture of both."""
    layer = nn.TransformerEncoderLayer(
        width, nhead=4, dim_feedforward=4 * width, dropout=0.0, batch_first=True
    )
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


class Gpt(nn.Module):
    """A decoder with the shapes of GPT-2: pre-norm layers, and a head that shares the embedding."""

    def __init__(
        self, layers: int = 12, width: int = 768, vocabulary: int = 50257, length: int = 1024
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=max(1, width // 64),
            dim_feedforward=4 * width,
            dropout=0.0,
            activation="gelu",
            batch_first=True,
            norm_first=True,
        )
        self.body = nn.TransformerEncoder(layer, layers, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits of the next tokens."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = nn.Transformer.generate_square_subsequent_mask(len(places), device=tokens.device)
        h = self.body(self.tokens(tokens) + self.places(places), mask=mask, is_causal=True)
        logits: Tensor = self.head(h)
        return logits


class _Bottleneck(nn.Module):
    """Three convolutions with batch norms, and a shortcut around them."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            *_convolution(channels, width, 1),
            nn.ReLU(inplace=True),
            *_convolution(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolution(width, 4 * width, 1),
        )
        same = stride == 1 and channels == 4 * width
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*_convolution(channels, 4 * width, 1, stride))
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.body(x) + self.shortcut(x))


def _convolution(channels: int, out: int, size: int, stride: int = 1) -> tuple[nn.Module, ...]:
    convolution = nn.Conv2d(channels, out, size, stride, padding=size // 2, bias=False)
    return convolution, nn.BatchNorm2d(out)


def resnet(blocks: Sequence[int] = (3, 4, 6, 3), width: int = 64, classes: int = 1000) -> nn.Module:
    """A residual network of bottleneck blocks; the default is ResNet-50."""
    layers: list[nn.Module] = [*_convolution(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, count in enumerate(blocks):
        for block in range(count):
            stride = 2 if stage and not block else 1
            layers.append(_Bottleneck(channels, width << stage, stride))
            channels = 4 * (width << stage)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    return nn.Sequential(*layers, *head)
