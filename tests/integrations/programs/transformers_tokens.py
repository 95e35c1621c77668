"""The mean over tokens with a loss of one's own in Transformers' Trainer, and TRL's SFTTrainer."""

import json
import sys

import torch
import torch.distributed as dist
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

WEIGHTED = sys.argv[1] == "weighted"


def own_loss(model, tokens, labels):
    logits = model(input_ids=tokens).logits[:, :-1]
    return F.cross_entropy(logits.flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class Own(Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs["labels"]
        loss = own_loss(model, inputs["input_ids"], labels)
        if WEIGHTED:
            model.reducer.weight((labels[:, 1:] != -100).sum().item())
        return loss


torch.manual_seed(0)
tokens = torch.randint(64, (8, 16))
labels = tokens.clone()
for row, length in enumerate((2, 4, 16, 3, 9, 5, 14, 7)):
    labels[row, length:] = -100
net = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=1, n_head=2, resid_pdrop=0.0,
               embd_pdrop=0.0, attn_pdrop=0.0)
)  # fmt: skip
before = net.transformer.wpe.weight.detach().clone()
right = torch.autograd.grad(own_loss(net, tokens, labels), net.transformer.wpe.weight)[0]
trainer = Own(
    net,
    TrainingArguments(
        "out",
        use_cpu=True,
        max_steps=1,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_grad_norm=0.0,
        optim="sgd",
        learning_rate=1.0,
        lr_scheduler_type="constant",
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    ),
    train_dataset=[{"input_ids": t, "labels": y} for t, y in zip(tokens, labels, strict=True)],
)
trainer.train()
if dist.get_rank() == 0:
    step = before - net.transformer.wpe.weight.detach()
    print("RESULT", json.dumps((step - right).abs().max().item() / right.abs().max().item()))
dist.destroy_process_group()
