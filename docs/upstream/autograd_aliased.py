"""Autograd: gradients that share memory are doubled after zero_grad(set_to_none=False)."""

import torch
from torch import nn

EXPECTED = [20.0, 20.0]  # of b and c


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
        self.c = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):  # b and c get views of one gradient, which both keep
        return self.a.view(-1) * 1.0 + (self.b.view(-1) + self.c.view(-1)) * x


if __name__ == "__main__":
    net = Net()
    for _ in range(2):
        net.zero_grad(set_to_none=False)
        net(2.0).square().sum().backward()
    seen = [net.b.grad[0].item(), net.c.grad[0, 0].item()]
    print("torch   ", torch.__version__)
    print("expected", EXPECTED)
    print("seen    ", seen)
    raise SystemExit(seen == EXPECTED)
