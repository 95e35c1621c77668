"""Lists of tensors as models have them, without data: shapes and dtypes of well-known networks.

The tensors are on the meta device, in the order in which the network registers them.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["gpt2_small", "many_small", "one_large", "resnet50", "vit_b16"]


def resnet50() -> list[Tensor]:
    """ResNet-50 (He et al., 2015), parameters and then buffers: 25.6 million and 0.05 million."""
    parameters, channels = [_meta(64, 3, 7, 7), *_norm(64)], [64]
    inputs = 64
    for width, blocks in ((64, 3), (128, 4), (256, 6), (512, 3)):
        for block in range(blocks):
            kernels = [(width, inputs, 1), (width, width, 3), (4 * width, width, 1)]
            if block == 0:  # the shortcut changes the width as well
                kernels.append((4 * width, inputs, 1))
            for outs, ins, size in kernels:
                parameters += [_meta(outs, ins, size, size), *_norm(outs)]
                channels.append(outs)
            inputs = 4 * width
    buffers = [
        buffer for n in channels for buffer in (*_norm(n), torch.empty((), dtype=torch.int64))
    ]
    return [*parameters, *_linear(1000, inputs), *(buffer.to("meta") for buffer in buffers)]


def gpt2_small() -> list[Tensor]:
    """GPT-2 small (Radford et al., 2019), the output tied to the embedding: 124 million."""
    width = 768
    tensors = [_meta(50257, width), _meta(1024, width)]
    for _ in range(12):
        tensors += _transformer_block(width)
    return [*tensors, *_norm(width)]


def vit_b16() -> list[Tensor]:
    """ViT-B/16 for images of 224 × 224 (Dosovitskiy et al., 2020): 86.6 million."""
    width = 768
    tensors = [_meta(1, 1, width), _meta(width, 3, 16, 16), _meta(width), _meta(1, 197, width)]
    for _ in range(12):
        tensors += _transformer_block(width)
    return [*tensors, *_norm(width), *_linear(1000, width)]


def many_small() -> list[Tensor]:
    """1000 tensors of 1 KB."""
    return [_meta(250) for _ in range(1000)]


def one_large() -> list[Tensor]:
    """One tensor of 100 MB."""
    return [_meta(25_000_000)]


def _transformer_block(width: int) -> list[Tensor]:
    """Attention and a feed-forward of four times the width, with a norm before each."""
    return [
        *_norm(width),
        *_linear(3 * width, width),
        *_linear(width, width),
        *_norm(width),
        *_linear(4 * width, width),
        *_linear(width, 4 * width),
    ]


def _linear(outs: int, ins: int) -> list[Tensor]:
    return [_meta(outs, ins), _meta(outs)]


def _norm(width: int) -> list[Tensor]:
    """Weight and bias, or running mean and variance."""
    return [_meta(width), _meta(width)]


def _meta(*shape: int) -> Tensor:
    return torch.empty(shape, device="meta")
