"""The mean over tokens with Accelerate, as docs/recipes/tokens.md has it, and without its line."""

import json
import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import nn
from torch.nn import functional as F

WEIGHTED = sys.argv[1] == "weighted"
torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
x, y = torch.randn(4, 8, 16), torch.randint(5, (4, 8))
for micro, tokens in enumerate((1, 3, 8, 2)):
    y[micro, tokens:] = -100
net = nn.Linear(16, 5)
logits = F.linear(x, net.weight, net.bias).flatten(0, 1)
right = torch.autograd.grad(F.cross_entropy(logits, y.flatten()), net.weight)[0]

model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.0))
for micro in (2 * accelerator.process_index, 2 * accelerator.process_index + 1):
    with accelerator.accumulate(model):
        loss = F.cross_entropy(model(x[micro]), y[micro])
        if WEIGHTED:
            model.reducer.weight((y[micro] != -100).sum().item())
            loss = loss * accelerator.gradient_accumulation_steps  # which backward divides by
        accelerator.backward(loss)
if accelerator.is_main_process:
    print(
        "RESULT",
        json.dumps((net.weight.grad - right).abs().max().item() / right.abs().max().item()),
    )
del model, optimizer, loss, logits
accelerator.free_memory()
accelerator.end_training()
if dist.is_initialized():
    dist.destroy_process_group()
