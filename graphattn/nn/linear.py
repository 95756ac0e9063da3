"""Linear maps, by the project's own matrix product where PyTorch's is slow; modules and parameters are as ever."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import torch_geometric.nn
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.modules.module import _has_any_global_hook

_LEAST_WORK = 4_000_000  # multiply-adds below which the call costs more than the product saves


def mapped(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """``layer(x)``: by `linear` where the layer is a plain linear one, or a sequence with some, and nobody watches."""
    kind = type(layer)
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or _is_watched(layer):  # pyright: ignore[reportPrivateImportUsage]
        return layer(x)
    if kind is torch.nn.Linear or kind is torch_geometric.nn.Linear:
        return linear(x, layer.weight, layer.bias)  # pyright: ignore[reportArgumentType]
    if kind is torch.nn.Sequential:
        for step in layer:  # pyright: ignore[reportGeneralTypeIssues]
            x = mapped(step, x)
        return x
    return layer(x)


def _is_watched(layer: torch.nn.Module) -> bool:
    """Whether calling the layer does more than its class's `forward`."""
    return bool(
        layer._forward_hooks
        or layer._forward_pre_hooks
        or layer._backward_hooks
        or layer._backward_pre_hooks
        or "forward" in vars(layer)
        or _has_any_global_hook()
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`torch.nn.functional.linear`, of another making where it is large, eager and on a CPU that MKL is slow on."""
    operands = (x, weight) if bias is None else (x, weight, bias)
    if not _in_memory(*operands) or not _large(x, weight, bias) or torch.is_autocast_enabled("cpu"):
        return F.linear(x, weight, bias)
    from graphattn.kernels import product_cpu

    if not product_cpu.FASTER:
        return F.linear(x, weight, bias)
    if x.dim() == 2:
        return _Product.apply(x, weight.t(), bias)  # pyright: ignore[reportReturnType]
    out = _Product.apply(x.reshape(-1, x.size(-1)), weight.t(), bias)
    # Not a view, which could not be changed in place: nobody else sees what it would be one of.
    return torch.ops.aten._unsafe_view(out, [*x.shape[:-1], weight.size(0)])


def _in_memory(*operands: Any) -> bool:
    """Whether the operands are numbers in this machine's memory, and PyTorch nothing but computes with them.

    It may also record, replace or transform every operation: `torch.compile`, tracers, `torch.func`, fake tensors,
    counters of operations, forward-mode derivatives.
    """
    return (
        all(type(x) in (Tensor, torch.nn.Parameter) for x in operands)
        and not torch.compiler.is_compiling()
        and not torch.jit.is_tracing()  # pyright: ignore[reportPrivateImportUsage]
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
        and not torch._C._are_functorch_transforms_active()
        and forward_ad._current_level < 0
        and all(
            x.device.type == "cpu"
            and x.layout is torch.strided
            and not x.is_nested
            and not x.is_neg()
            and not x._is_zerotensor()
            and torch._C._has_storage(x)  # not so where there are many gradients at a time
            and x.data_ptr() != 0  # as where the storage was freed
            for x in operands
        )
    )


def _large(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether the product is worth a call of its own; where shapes do not fit, PyTorch says what is wrong."""
    return (
        x.dim() >= 2
        and weight.dim() == 2
        and x.size(-1) == weight.size(1)
        and (bias is None or bias.shape == weight.shape[:1])
        and x.numel() * weight.size(0) >= _LEAST_WORK
        and x.dtype in (torch.float32, torch.float64)
        and x.dtype == weight.dtype
        and (bias is None or x.dtype == bias.dtype)
    )


class _Product(torch.autograd.Function):
    """``a @ b + bias``, whose derivatives are products as well."""

    @staticmethod
    def forward(ctx, a, b, bias):
        from graphattn.kernels.product_cpu import multiply

        of_a, of_b, _ = ctx.needs_input_grad
        ctx.save_for_backward(a if of_b else None, b if of_a else None)
        return multiply(a, b, bias)

    @staticmethod
    def backward(ctx, *grads):
        (grad,), (a, b) = grads, ctx.saved_tensors
        of_a, of_b, of_bias = ctx.needs_input_grad
        if grad.layout is not torch.strided:
            grad = grad.to_dense()
        return (
            _times(grad, b.t()) if of_a else None,
            _times(a.t(), grad) if of_b else None,
            grad.sum(0) if of_bias else None,
        )


def _times(a: Tensor, b: Tensor) -> Any:
    return _Product.apply(a, b, None) if _in_memory(a, b) else a @ b
