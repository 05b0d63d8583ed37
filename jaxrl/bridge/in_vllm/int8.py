"""Linear layers in int8, quantised from whole weights whenever vLLM loads them; runs inside vLLM.

As `models.integers` says: a factor for each row of a matrix and for each token. vLLM's own W8A8 of
compressed-tensors computes the same on a CPU. It reads numbers that are quantised already, and
after a reload its kernel would read factors that are freed.
"""

import functools
from typing import Any

import torch
from vllm.model_executor.kernels.linear import init_int8_linear_kernel
from vllm.model_executor.layers.linear import UnquantizedLinearMethod


class Int8LinearMethod(UnquantizedLinearMethod):
    """The method of one layer."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Quantises the layer's weights and gives them to vLLM's kernel."""
        weight: Any = layer.weight
        integers, factors = quantise(weight.data)
        # Of its own, because the kernel reads the factors where they lie now.
        packed: Any = torch.nn.Module()
        packed.logical_widths = [len(integers)]
        for name in ("input_scale", "input_zero_point", "azp_adj"):
            packed.register_parameter(name, None)
        packed.weight = torch.nn.Parameter(integers, requires_grad=False)
        packed.weight_scale = torch.nn.Parameter(factors, requires_grad=False)
        kernel = self._kernel = init_int8_linear_kernel(
            is_channelwise=True,
            is_static_input_scheme=False,
            input_symmetric=True,
            module_name=type(self).__name__,
        )
        packed.bias = layer.bias
        if weight.dtype == torch.bfloat16:
            kernel.process_weights_after_loading(packed)
        else:
            # With AMX, vLLM would choose a kernel that has activations in bf16 alone.
            kernel.process_weights_for_onednn(packed)
            kernel.linear_method = kernel._apply_weights_onednn
        self._packed = packed
        layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)

    def apply(
        self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Multiplies [..., in] by the weights, and adds the bias: [..., out]."""
        del layer
        return self._kernel.apply_weights(self._packed, x, bias)


@functools.cache
def sums_are_exact() -> bool:
    """Tells if the kernel's sums are those of integers. They are wrong on processors that add
    products of 8 bits in 16: there are no units for it before AVX512-VNNI."""
    layer, size = torch.nn.Module(), 512
    layer.weight = torch.nn.Parameter(torch.ones(size, size))
    layer.register_parameter("bias", None)
    method = Int8LinearMethod()
    method.process_weights_after_loading(layer)
    found = method.apply(layer, torch.ones(1, size))
    return bool(torch.allclose(found, torch.full_like(found, size)))


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounds a matrix [out, in] to i8[out, in] and factors f32[out, 1], bit for bit as
    `models.integers.quantise`."""
    wide = weight.float()
    factors = wide.abs().amax(dim=1, keepdim=True) / 127
    inverse = torch.where(factors > 0, 1 / factors, 0)
    return torch.round(wide * inverse).to(torch.int8), factors
