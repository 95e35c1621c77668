"""Building blocks of random programs."""

from __future__ import annotations

import time

import torch

from gradwire.hooks import all_reduce

__all__ = ["Branches", "HangingData", "failing_hook"]


class Branches(torch.nn.Module):
    """Two layers, of which the second is optional."""

    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x, short=False):
        x = self.first(x)
        return x if short else self.second(x)


class HangingData(torch.utils.data.Dataset):
    """Dataset whose worker hangs in one item."""

    def __init__(self, hangs, at):
        self.hangs, self.at = hangs, at

    def __len__(self):
        return 100

    def __getitem__(self, index):
        while self.hangs and index == self.at:
            time.sleep(1)
        return torch.ones(1)


def failing_hook(fails, at):
    """Return a communication hook that raises in one of its calls."""
    calls = []

    def hook(state, bucket):
        calls.append(1)
        if fails and len(calls) > at:
            raise ValueError("the hook's own")
        return all_reduce(None, bucket)

    return hook
