"""The networks whose training step is measured, small enough for one thread per rank.

Their batches are chosen so that on two ranks with one thread each, torch's communication is
between a fifth and a half of the step: with less, nothing of it would show in the step; with
more, the step would be nothing else.
"""

from __future__ import annotations

from torch import nn

__all__ = ["linear_layers", "mlp", "transformer"]


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
