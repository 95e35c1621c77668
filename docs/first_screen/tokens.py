"""Train a language model on sequences of different lengths, with a mistake that raises no error."""

import gc

import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    """Train on sequences of different lengths."""
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    net = torch.nn.Sequential(torch.nn.Embedding(100, 16), torch.nn.Linear(16, 100))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(24):
        tokens = torch.randint(100, (4, 33))
        is_padding = torch.arange(32) >= torch.randint(1, 33, (4, 1))
        labels = tokens[:, 1:].masked_fill(is_padding, -100)
        optimizer.zero_grad()
        loss = cross_entropy(model(tokens[:, :-1]).flatten(0, 1), labels.flatten())
        loss.backward()
        optimizer.step()
    dist.destroy_process_group()


main()
gc.collect()  # Gloo's threads end with the last reference to the group
