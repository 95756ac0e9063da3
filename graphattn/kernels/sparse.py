"""Attention on listed edges as PyTorch operators: schema, shapes, autograd and vmap; one body per device.

``graphattn::sparse_attention`` saves its inputs, out, lse, lse_low and aggregate: nothing with a row per edge and
head. ``graphattn::sparse_attention_backward`` recomputes the weights from lse. Its own derivative, which
second derivatives ask for, is the one of the reference formula.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from graphattn.kernels import reference

# The indices of a graph, by query and by key (see graphattn.graph.SparseGraph).
_GRAPH = "Tensor rowptr, Tensor col, Tensor edge_id, Tensor colptr, Tensor row, Tensor edge_id_t"
_OPTIONS = (
    "Tensor? bias, Tensor? edge_attr, Tensor? edge_projection, Tensor? seed,"
    " float scale, float softcap, float dropout_p, bool return_weights"
)
_INPUTS = f"Tensor query, Tensor key, Tensor value, {_GRAPH}, {_OPTIONS}"
# lse_low: the digits of lse that it has no room for, as both are rounded. Without them, the weights of large scores
# would be wrong when they are computed again.
_OUTPUTS = "Tensor out, Tensor lse, Tensor lse_low, Tensor aggregate, Tensor weights"
# A gradient of another shape than its output, in fact an empty one, is not there.
_GRADS = "Tensor grad_out, Tensor grad_lse, Tensor grad_weights"

_library = torch.library.Library("graphattn", "FRAGMENT")
_library.define(f"sparse_attention({_INPUTS}) -> ({_OUTPUTS})", tags=[torch.Tag.pt2_compliant_tag])
_library.define(
    f"sparse_attention_backward({_GRADS}, {_OUTPUTS}, {_INPUTS}) -> (Tensor grad_query, Tensor grad_key,"
    " Tensor grad_value, Tensor grad_bias, Tensor grad_edge_attr, Tensor grad_edge_projection)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_forward = torch.ops.graphattn.sparse_attention.default
_backward = torch.ops.graphattn.sparse_attention_backward.default

_FLOATING = (0, 1, 2, 9, 10, 11)  # query, key, value, bias, edge_attr, edge_projection among the inputs


def sparse_attention(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over the edges of a graph: the schema above, the meaning of `reference.sparse_attention`.

    Takes the indices by query and by key, and ``return_weights``; without it ``weights`` is empty. The
    outputs are float32, or float64 for float64 inputs. Differentiable in reverse mode, twice in eager mode.
    """
    out, lse, _, _, weights = _forward(*inputs)
    return out, lse, weights


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.impl(_library, "sparse_attention", "CPU")
def _forward_cpu(*inputs):
    from graphattn.kernels import sparse_cpu  # Numba loads where a kernel runs

    return sparse_cpu.forward(*inputs)


@torch.library.impl(_library, "sparse_attention_backward", "CPU")
def _backward_cpu(*arguments):
    from graphattn.kernels import sparse_cpu

    return sparse_cpu.backward(*arguments)


@torch.library.impl(_library, "sparse_attention", "CUDA")
def _forward_cuda(*inputs):
    return _triton().forward(*inputs)


@torch.library.impl(_library, "sparse_attention_backward", "CUDA")
def _backward_cuda(*arguments):
    return _triton().backward(*arguments)


def _triton():
    try:
        from graphattn.kernels import sparse_triton
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"graph_attention on CUDA tensors needs Triton, which comes with PyTorch for CUDA: {error}."
            " Install it with `pip install triton`, or move the tensors with `.cpu()`.",
            name=error.name,
        ) from error
    return sparse_triton


@torch.library.register_fake("graphattn::sparse_attention", lib=_library)
def _forward_fake(query, key, value, *rest):
    col, edge_attr, return_weights = rest[1], rest[7], rest[-1]
    batch, num_queries, heads, _ = query.shape
    width = 0 if edge_attr is None else edge_attr.size(1)
    wide = query.new_empty(0, dtype=_wide(query))
    return (
        wide.new_empty(batch, num_queries, heads, value.size(-1)),
        wide.new_empty(batch, num_queries, heads),
        wide.new_empty(batch, num_queries, heads),
        wide.new_empty(batch, num_queries, heads, width),
        wide.new_empty(batch, col.size(0), heads) if return_weights else wide,
    )


@torch.library.register_fake("graphattn::sparse_attention_backward", lib=_library)
def _backward_fake(*arguments):
    inputs = arguments[8:]
    return tuple(
        inputs[0].new_empty(0)
        if inputs[i] is None
        else torch.empty_like(inputs[i], memory_format=torch.contiguous_format)
        for i in _FLOATING
    )


def _forward_vmap(info, in_dims, *inputs):
    """A mapped dimension of features is one more leading dimension; graph and options are shared."""
    if any(d is not None for d in in_dims[3:]):
        raise NotImplementedError(
            "graph_attention's sparse kernel maps over query, key and value alone under vmap; the graph,"
            " bias, edge features and dropout seed are shared. Call it in a loop for the others."
        )
    inputs = list(inputs)
    for i in range(3):
        moved = inputs[i].unsqueeze(0) if in_dims[i] is None else inputs[i].movedim(in_dims[i], 0)
        inputs[i] = moved.expand(info.batch_size, *moved.shape[1:]).flatten(0, 1)
    outputs = _forward(*inputs)
    mapped = [x.unflatten(0, (info.batch_size, -1)) for x in (outputs if inputs[-1] else outputs[:4])]
    return (*mapped, *outputs[len(mapped) :]), tuple([0] * len(mapped) + [None] * (5 - len(mapped)))


torch.library.register_vmap("graphattn::sparse_attention", _forward_vmap, lib=_library)


def _spread(grads: Sequence[Tensor], inputs: Sequence) -> list[Tensor | None]:
    """Place the gradients of the floating inputs that are given among those of all inputs."""
    given = iter(grads)
    return [next(given) if i in _FLOATING and x is not None else None for i, x in enumerate(inputs)]


_NO_FORWARD_MODE = (
    "graph_attention's sparse kernel has no forward-mode derivative. Differentiate in reverse mode"
    " (torch.autograd.grad, backward)."
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = _forward(*inputs)
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
        grads = _backward(*grads, *outputs, *inputs)
        return tuple(_spread([grad for i, grad in zip(_FLOATING, grads) if inputs[i] is not None], inputs))

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            grads = _backward(*arguments)
        ctx.rest = [None if isinstance(x, Tensor) else x for x in arguments]
        ctx.save_for_backward(*(x if isinstance(x, Tensor) else None for x in arguments))
        return grads

    @staticmethod
    def backward(ctx, *grad_grads):
        arguments: list[Any] = [
            rest if tensor is None else tensor for tensor, rest in zip(ctx.saved_tensors, ctx.rest)
        ]
        grads, given = arguments[:3], arguments[8:]
        create_graph = torch.is_grad_enabled()

        def alone(x: Tensor) -> Tensor:
            """The argument as a variable of its own, whatever else it is a function of."""
            return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()

        # The outputs among the arguments are functions of the inputs: their share is in the inputs'
        # derivative.
        with torch.enable_grad():
            inputs: list[Any] = [
                alone(x) if i in _FLOATING and x is not None else x for i, x in enumerate(given)
            ]
            grads = [alone(grad) for grad in grads]
            floating = [inputs[i] for i in _FLOATING if inputs[i] is not None]
            outputs = reference.sparse_attention(*inputs[:6], *inputs[9:16])
            used = [i for i, x in enumerate(outputs) if x.requires_grad and grads[i].shape == x.shape]
            first = torch.autograd.grad(
                [outputs[i] for i in used],
                floating,
                [grads[i] for i in used],
                create_graph=True,
                materialize_grads=True,
            )
        seeds = [g for i, g in zip(_FLOATING, grad_grads) if inputs[i] is not None]
        second = torch.autograd.grad(
            first, [*grads, *floating], seeds, create_graph=create_graph, materialize_grads=True
        )
        return *second[:3], *[None] * 5, *_spread(second[3:], inputs)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)


torch.library.impl(_library, "sparse_attention", "Autograd")(_Attention.apply)
torch.library.impl(_library, "sparse_attention_backward", "Autograd")(_AttentionBackward.apply)
