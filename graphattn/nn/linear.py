"""Linear maps, by the project's own matrix product where PyTorch's is slow; modules and parameters are as ever."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

_LEAST_WORK = 4_000_000  # multiply-adds below which the call costs more than the product saves


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, of another making where it is large, eager and on a CPU that MKL is slow on."""
    traced = torch.compiler.is_compiling() or torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
    if traced or not _large(x, weight, bias):
        return F.linear(x, weight, bias)
    from graphattn.kernels import product_cpu

    if not product_cpu.FASTER:
        return F.linear(x, weight, bias)
    return _Product.apply(x.reshape(-1, x.size(-1)), weight.t(), bias).view(*x.shape[:-1], -1)


def _large(x: Any, weight: Any, bias: Any) -> bool:
    """Whether the product is worth a call of its own, of plain tensors that nothing else looks at."""
    operands = [x, weight] if bias is None else [x, weight, bias]
    return (
        all(type(operand) in (Tensor, torch.nn.Parameter) for operand in operands)
        and x.dim() >= 2
        and weight.dim() == 2
        and x.size(-1) == weight.size(1)  # else PyTorch says what is wrong
        and (bias is None or bias.shape == weight.shape[:1])
        and x.numel() * weight.size(0) >= _LEAST_WORK
        and x.dtype in (torch.float32, torch.float64)
        and all(
            operand.dtype == x.dtype and operand.device.type == "cpu" and operand.layout is torch.strided
            for operand in operands
        )
        and not torch.is_autocast_enabled("cpu")
        and all(torch._C._has_storage(operand) for operand in operands)  # not so in `torch.func`
    )


class _Product(torch.autograd.Function):
    """``a @ b + bias``, whose derivatives are products as well."""

    @staticmethod
    def forward(ctx, a, b, bias):
        from graphattn.kernels.product_cpu import multiply

        ctx.save_for_backward(a, b)
        return multiply(a, b, bias)

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (a, b) = grads, ctx.saved_tensors
        of_a, of_b, of_bias = ctx.needs_input_grad
        return (
            _times(grad, b.t()) if of_a else None,
            _times(a.t(), grad) if of_b else None,
            grad.sum(0) if of_bias else None,
        )


def _times(a: Tensor, b: Tensor) -> Any:
    whole = torch._C._has_storage(a) and torch._C._has_storage(b)  # not so for many gradients at a time
    return _Product.apply(a, b, None) if whole else a @ b


class Linear(torch.nn.Linear):
    """PyTorch's layer, computed by `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)
