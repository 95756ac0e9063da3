"""Attention on the edges of a graph as PyTorch operators: schema, shapes, autograd and vmap; one body per device.

An operator saves its inputs, out, lse, lse_low and aggregate: nothing with a row per edge and head. Its backward
operator recomputes the weights from lse. The derivative of that, which second derivatives ask for, is the one of the
reference formula. `define` makes such a pair for one description of the edges; here it is by lists of them,
``graphattn::sparse_attention``.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from graphattn.kernels import reference

_OPTIONS = (
    "Tensor? bias, Tensor? edge_attr, Tensor? edge_projection, Tensor? seed,"
    " float scale, float softcap, float dropout_p, bool return_weights"
)
# lse_low: the digits of lse that it has no room for, as both are rounded. Without them, the weights of large scores
# would be wrong when they are computed again.
_OUTPUTS = "Tensor out, Tensor lse, Tensor lse_low, Tensor aggregate, Tensor weights"
# A gradient of another shape than its output, in fact an empty one, is not there.
_GRADS = "Tensor grad_out, Tensor grad_lse, Tensor grad_weights"
_FLOATING = (0, 1, 2, -8, -7, -6)  # query, key, value, bias, edge_attr, edge_projection among the inputs
_EDGE_ATTR = -7  # most often data: its gradient is formed only where it is asked for

_library = torch.library.Library("graphattn", "FRAGMENT")


class _Operator(NamedTuple):
    """A pair of operators, and what tells the edges that the arguments between value and bias describe."""

    forward: Any
    backward: Any
    layout: Callable[..., Sequence[int]]  # the shape of per-edge tensors
    listed: Callable[..., Sequence[Tensor]]  # rowptr, col, edge_id as for `reference.sparse_attention`


def define(
    name: str, graph: str, layout: Callable, listed: Callable, forward: Callable, backward: Callable,
    forward_cuda: Callable, backward_cuda: Callable,
) -> Any:  # fmt: skip
    """Define ``graphattn::{name}`` and its backward operator; ``graph`` is the schema of what describes the edges."""
    inputs = f"Tensor query, Tensor key, Tensor value, {graph}, {_OPTIONS}"
    tags = [torch.Tag.pt2_compliant_tag]
    _library.define(f"{name}({inputs}) -> ({_OUTPUTS})", tags=tags)
    _library.define(
        f"{name}_backward({_GRADS}, {_OUTPUTS}, {inputs}, bool with_edge_attr) -> (Tensor grad_query, Tensor grad_key,"
        " Tensor grad_value, Tensor grad_bias, Tensor grad_edge_attr, Tensor grad_edge_projection)",
        tags=tags,
    )
    ops = torch.ops.graphattn
    operator = _Operator(getattr(ops, name).default, getattr(ops, f"{name}_backward").default, layout, listed)
    _library.impl(name, forward, "CPU")
    _library.impl(f"{name}_backward", backward, "CPU")
    _library.impl(name, forward_cuda, "CUDA")
    _library.impl(f"{name}_backward", lambda *arguments: backward_cuda(*arguments[:-1]), "CUDA")
    for key, function, op in (
        (name, _Attention, operator.forward),
        (f"{name}_backward", _AttentionBackward, operator.backward),
    ):
        apply = functools.partial(function.apply, operator)
        _library.impl(key, functools.partial(record, apply, op), "Autograd")
    fake, vmap = functools.partial(_forward_fake, operator), functools.partial(map_features, operator.forward)
    torch.library.register_fake(f"graphattn::{name}", fake, lib=_library)
    torch.library.register_fake(f"graphattn::{name}_backward", _backward_fake, lib=_library)
    torch.library.register_vmap(f"graphattn::{name}", vmap, lib=_library)
    return operator.forward


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _forward_fake(operator: _Operator, *inputs):
    query, value, edge_attr, return_weights = inputs[0], inputs[2], inputs[-7], inputs[-1]
    batch, num_queries, heads, _ = query.shape
    width = 0 if edge_attr is None else edge_attr.size(1)
    wide = query.new_empty(0, dtype=_wide(query))
    return (
        wide.new_empty(batch, num_queries, heads, value.size(-1)),
        wide.new_empty(batch, num_queries, heads),
        wide.new_empty(batch, num_queries, heads),
        wide.new_empty(batch, num_queries, heads, width),
        wide.new_empty(batch, math.prod(operator.layout(*inputs[3:-8])), heads) if return_weights else wide,
    )


def _backward_fake(*arguments):
    inputs, with_edge_attr = arguments[8:-1], arguments[-1]
    return tuple(
        inputs[0].new_empty(0)
        if inputs[i] is None or (i == _EDGE_ATTR and not with_edge_attr)
        else torch.empty_like(inputs[i], memory_format=torch.contiguous_format)
        for i in _FLOATING
    )


def record(apply: Callable, operator: Callable, *inputs) -> Any:
    """Apply an autograd function where somebody may ask for derivatives, else the operator that it is made of.

    A record that nobody reads takes as long as a graph of some hundred edges.
    """
    recorded = torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in inputs)
    if recorded or forward_ad._current_level >= 0:  # forward mode, which the function refuses
        return apply(*inputs)
    with torch._C._AutoDispatchBelowAutograd():
        return operator(*inputs)


def map_features(forward: Callable, info, in_dims, *inputs):
    """The vmap rule: a mapped dimension of features is one more leading dimension, graph and options are shared."""
    if any(d is not None and not isinstance(d, list) for d in in_dims[3:]):
        raise NotImplementedError(
            "graph_attention's kernels map over query, key and value alone under vmap; the graph,"
            " bias, edge features and dropout seed are shared. Call it in a loop for the others."
        )
    inputs = list(inputs)
    for i in range(3):
        moved = inputs[i].unsqueeze(0) if in_dims[i] is None else inputs[i].movedim(in_dims[i], 0)
        inputs[i] = moved.expand(info.batch_size, *moved.shape[1:]).flatten(0, 1)
    outputs = forward(*inputs)
    absent = [x.dim() == 1 for x in outputs]  # weights that were not asked for
    mapped = (x if no else x.unflatten(0, (info.batch_size, -1)) for x, no in zip(outputs, absent))
    return tuple(mapped), tuple(None if no else 0 for no in absent)


def _spread(grads: Sequence[Tensor], inputs: Sequence) -> list[Tensor | None]:
    """Place the gradients of the floating inputs that are given among those of all inputs."""
    spread: list[Tensor | None] = [None] * len(inputs)
    given = iter(grads)
    for i in _FLOATING:
        if inputs[i] is not None:
            spread[i] = next(given)
    return spread


_NO_FORWARD_MODE = (
    "graph_attention's kernels have no forward-mode derivative. Differentiate in reverse mode"
    " (torch.autograd.grad, backward)."
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operator, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = operator.forward(*inputs)
        ctx.operator = operator
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*outputs[2:4])
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
        ctx.save_for_backward(*outputs, *(x if isinstance(x, Tensor) else None for x in inputs))
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # once: checkpointing recomputes the forward pass at each access
        outputs, tensors = saved[:5], saved[5:]
        inputs = [rest if tensor is None else tensor for tensor, rest in zip(tensors, ctx.rest)]
        grads = [x.new_empty(0) if grad is None else grad for grad, x in zip(grads, outputs)]
        del grads[2:4]  # lse_low is a remainder, aggregate for the backward pass alone
        grads = ctx.operator.backward(*grads, *outputs, *inputs, ctx.needs_input_grad[_EDGE_ATTR])
        grads = [grad for i, grad in zip(_FLOATING, grads) if inputs[i] is not None]
        return None, *_spread(grads, inputs)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, operator, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            grads = operator.backward(*arguments)
        ctx.operator = operator
        ctx.rest = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
        return grads

    @staticmethod
    def backward(ctx, *grad_grads):
        arguments: list[Any] = [
            rest if tensor is None else tensor for tensor, rest in zip(ctx.saved_tensors, ctx.rest)
        ]
        grads, given = arguments[:3], arguments[8:-1]
        create_graph = torch.is_grad_enabled()

        def alone(x: Tensor) -> Tensor:
            """The argument as a variable of its own, whatever else it is a function of."""
            return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()

        # The outputs among the arguments are functions of the inputs: their share is in the inputs'
        # derivative.
        with torch.enable_grad():
            inputs: list[Any] = list(given)
            for i in _FLOATING:
                inputs[i] = None if inputs[i] is None else alone(inputs[i])
            grads = [alone(grad) for grad in grads]
            floating = [inputs[i] for i in _FLOATING if inputs[i] is not None]
            graph, options = inputs[3:-8], inputs[-8:-1]
            layout, edges = ctx.operator.layout(*graph), ctx.operator.listed(*graph)
            outputs = reference.sparse_attention(*inputs[:3], *edges, *options, layout=layout)
            used = [i for i, x in enumerate(outputs) if x.requires_grad and grads[i].shape == x.shape]
            first = torch.autograd.grad(
                [outputs[i] for i in used],
                floating,
                [grads[i] for i in used],
                create_graph=True,
                materialize_grads=True,
            )
        seeds = [g for i, g in zip(_FLOATING, grad_grads) if inputs[i] is not None]
        formed = [
            n for n, x in enumerate(first) if seeds[n].shape == x.shape
        ]  # not so: a gradient that was not there
        second = torch.autograd.grad(
            [first[n] for n in formed],
            [*grads, *floating],
            [seeds[n] for n in formed],
            create_graph=create_graph,
            materialize_grads=True,
        )
        return None, *second[:3], *[None] * 5, *_spread(second[3:], inputs), None

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)


def _forward_cpu(query, key, value, rowptr, col, edge_id, colptr, row, edge_id_t, *options):
    from graphattn.kernels import sparse_cpu  # Numba loads where a kernel runs

    return sparse_cpu.forward(sparse_cpu.listed(rowptr, col, edge_id), query, key, value, *options)


def _backward_cpu(*arguments):
    from graphattn.kernels import sparse_cpu

    rows, columns = sparse_cpu.listed(*arguments[11:14]), sparse_cpu.listed(*arguments[14:17])
    return sparse_cpu.backward(rows, columns, *(arguments[:11] + arguments[17:]))


def triton_kernels(module: str) -> Any:
    """A module of ``graphattn.kernels`` that needs Triton, imported where a CUDA tensor arrives."""
    try:
        return importlib.import_module(f"graphattn.kernels.{module}")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"graph_attention on CUDA tensors needs Triton, which comes with PyTorch for CUDA: {error}."
            " Install it with `pip install triton`, or move the tensors with `.cpu()`.",
            name=error.name,
        ) from error


_sparse_attention = define(
    "sparse_attention",
    # The indices of a graph, by query and by key (see graphattn.graph.SparseGraph).
    "Tensor rowptr, Tensor col, Tensor edge_id, Tensor colptr, Tensor row, Tensor edge_id_t",
    lambda rowptr, col, *_: (col.size(0),),
    lambda rowptr, col, edge_id, *_: (rowptr, col, edge_id),
    _forward_cpu,
    _backward_cpu,
    lambda *inputs: triton_kernels("windows_triton").forward(*inputs),
    lambda *arguments: triton_kernels("windows_triton").backward(*arguments),
)


def sparse_attention(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over the edges of a graph: the schema above, the meaning of `reference.sparse_attention`.

    Takes the indices by query and by key, and ``return_weights``; without it ``weights`` is empty. The
    outputs are float32, or float64 for float64 inputs. Differentiable in reverse mode, twice in eager mode.
    """
    out, lse, _, _, weights = _sparse_attention(*inputs)
    return out, lse, weights
