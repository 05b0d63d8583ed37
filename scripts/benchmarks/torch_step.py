"""A GRPO step of Qwen3, hand-written in torch: the work of `jaxrl bench --only learner`.

    python scripts/benchmarks/torch_step.py configs/models/qwen3_0_6b

f32 master weights, bf16 operands, fused AdamW, layers and head compiled. Each sequence is a row of
its own, so that cuDNN's attention computes nothing in vain. Needs only torch.
"""

import argparse
import json
import math
import time
from pathlib import Path

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

PROMPT, CHUNK = 256, 4096  # CHUNK: tokens whose logits are computed at once
KERNELS = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("--row", type=int, default=8192, help="tokens of a microbatch")
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--microbatches", type=int, default=4)
    arguments = parser.parse_args()
    config = json.loads((arguments.model / "config.json").read_text())
    device = "cuda" if torch.cuda.is_available() else "cpu"
    vocab, hidden, layers = (config[k] for k in ("vocab_size", "hidden_size", "num_hidden_layers"))
    heads, kv, dim = (
        config["num_attention_heads"],
        config["num_key_value_heads"],
        config["head_dim"],
    )
    mlp, base = config["intermediate_size"], config["rope_theta"]
    torch.manual_seed(0)

    def new(*size: int) -> torch.Tensor:
        return torch.randn(*size, device=device) * 0.02

    def one(size: int) -> torch.Tensor:
        return torch.ones(size, device=device)

    master = [new(vocab, hidden), one(hidden)]
    for _ in range(layers):
        master += [one(hidden), one(hidden), one(dim), one(dim)]
        master += [new((heads + 2 * kv) * dim, hidden), new(hidden, heads * dim)]
        master += [new(2 * mlp, hidden), new(hidden, mlp)]
    optimizer = torch.optim.AdamW(master, lr=1e-6, weight_decay=0.0, fused=True)
    frequencies = base ** (-torch.arange(0, dim, 2, device=device).float() / dim)
    angles = torch.arange(arguments.sequence, device=device).float()[:, None] * frequencies
    cos, sin = (torch.cat([f(angles)] * 2, -1)[None, :, None, :] for f in (torch.cos, torch.sin))

    def rope(x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        first, second = wide.chunk(2, -1)
        return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)

    @torch.compile
    def layer(x, n1, n2, nq, nk, qkv, o, gate_up, down):
        y = functional.rms_norm(x, (hidden,), n1, 1e-6)
        q, k, v = (y @ qkv.t()).split([heads * dim, kv * dim, kv * dim], -1)
        q = rope(functional.rms_norm(q.unflatten(-1, (heads, dim)), (dim,), nq, 1e-6))
        k = rope(functional.rms_norm(k.unflatten(-1, (kv, dim)), (dim,), nk, 1e-6))
        q, k, v = (z.transpose(1, 2) for z in (q, k, v.unflatten(-1, (kv, dim))))
        with sdpa_kernel(KERNELS, set_priority=True):
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + out.transpose(1, 2).flatten(2) @ o.t()
        gate, up = (functional.rms_norm(x, (hidden,), n2, 1e-6) @ gate_up.t()).chunk(2, -1)
        return x + (functional.silu(gate) * up) @ down.t()

    @torch.compile
    def scores(h, embed, target):
        logits = (h @ embed.t()).float()
        return logits.gather(-1, target[:, None])[:, 0] - logits.logsumexp(-1)

    micro, count = arguments.microbatches, arguments.row // arguments.sequence
    data = torch.randint(10, vocab, (micro, count, arguments.sequence), device=device)
    advantages = torch.randn(micro, count, 1, device=device)
    completion = arguments.sequence - PROMPT
    old = -math.log(vocab) + 0.1 * torch.randn(micro, count, completion, device=device)

    def step() -> None:
        weights = [p.to(torch.bfloat16).requires_grad_() for p in master]
        for p in master:
            p.grad = torch.zeros_like(p)
        for tokens, advantage, sampled in zip(data, advantages, old, strict=True):
            x = functional.embedding(tokens, weights[0])
            for i in range(layers):
                x = layer(x, *weights[2 + 8 * i : 10 + 8 * i])
            h = functional.rms_norm(x, (hidden,), weights[1], 1e-6)[:, PROMPT - 1 : -1].flatten(
                0, 1
            )
            parts = zip(h.split(CHUNK), tokens[:, PROMPT:].flatten().split(CHUNK), strict=True)
            logp = torch.cat(
                [checkpoint(scores, a, weights[0], b, use_reentrant=False) for a, b in parts]
            )
            ratio, a = torch.exp(logp - sampled.flatten()), advantage.expand_as(sampled).flatten()
            loss = -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a).sum() / old.numel()
            grads = torch.autograd.grad(loss, weights)
            torch._foreach_add_([p.grad for p in master], [g.float() for g in grads])
        torch.nn.utils.clip_grad_norm_(master, 1.0)
        optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    seconds = []
    for _ in range(6):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    print(json.dumps({"torch": torch.__version__, "tokens/s": data.numel() / min(seconds)}))


if __name__ == "__main__":
    main()
