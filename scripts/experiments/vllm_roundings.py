"""Shows how vLLM's CPU kernels round their f32 results to 16 bits, as a table.

    .venv-vllm/bin/python scripts/experiments/vllm_roundings.py

A cell is the share of results that equal the f32 result rounded to nearest, and cut off. Runs in
vLLM's environment.
"""

import argparse
from collections.abc import Iterator
from typing import Any


def results(dtype: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yields a kernel's name, its results and those in f32."""
    import torch
    import vllm.platforms.cpu  # noqa: F401  registers the kernels
    from vllm import _custom_ops as ops

    generator = torch.Generator().manual_seed(0)
    x, gate = (torch.randn(64, n, generator=generator).to(dtype) for n in (256, 512))
    weight, out = torch.rand(256, generator=generator).to(dtype), torch.empty_like(x)
    torch.ops._C.rms_norm(out, x, weight, 1e-6)
    wide = x.float()
    inverse = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    yield "RMSNorm", out, wide * inverse * weight.float()
    out = torch.empty_like(x)
    torch.ops._C.silu_and_mul(out, gate)
    left, right = gate.float().chunk(2, -1)
    yield "SiLU and product", out, torch.nn.functional.silu(left) * right
    matrix = torch.randint(-127, 128, (96, 256), dtype=torch.int8, generator=generator)
    scales = torch.rand(96, 1, generator=generator) / 100
    packed = ops.create_onednn_scaled_mm(matrix.t(), scales, dtype, True, False, 32)
    integers, factors, zero = ops.onednn_scaled_int8_quant(x, None, None, True)
    out = torch.empty(64, 96, dtype=dtype)
    ops.onednn_scaled_mm(packed, integers, out, factors, zero, None, None)
    sums = (integers.double() @ matrix.double().t()).float()
    yield "int8 projection", out, sums * scales.t() * factors


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    import torch

    print("| kernel | dtype | rounded | cut off |\n| --- | --- | --- | --- |")
    for dtype, kept in ((torch.bfloat16, 16), (torch.float16, 13)):
        for name, out, wide in results(dtype):
            bits = wide.contiguous().view(torch.int32)
            cut = (bits >> kept << kept).view(torch.float32).to(dtype)
            shares = [f"{(out == one).float().mean():.1%}" for one in (wide.to(dtype), cut)]
            print(f"| {name} | {str(dtype).removeprefix('torch.')} | {' | '.join(shares)} |")


if __name__ == "__main__":
    main()
