"""Attention on bands of consecutive keys as PyTorch operators: complete graphs, cliques, causal ones, wide windows.

Query i, at position ``offset + i``, attends to the keys ``offset + i - before`` to ``offset + i + after`` of its
sequence, None being all of them on that side. Sequences are packed along the nodes, sequence b being the nodes
``ptr[b]:ptr[b + 1]``; without ``ptr`` there is one, and keys and queries may differ in number.

``graphattn::block_attention`` works on blocks of some queries and all keys that these may see, and saves its inputs,
out, lse and lse_low: memory of a block at a time, never of all pairs. `graphattn.kernels.blocks_cpu` has the
arithmetic. The derivative of its backward pass, which second derivatives ask for, is the one of the formula at the end
of this file.
"""

import functools
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graphattn.kernels import reference
from graphattn.kernels.sparse import map_features, record

BLOCK = 64  # queries of a block
SEGMENT = 8  # blocks of a segment, at least

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? ptr, Tensor? seed, SymInt offset, int? before,"
    " int? after, float scale, float softcap, float dropout_p, bool return_weights"
)
_OUTPUTS = "Tensor out, Tensor lse, Tensor lse_low, Tensor weights"  # as in `graphattn.kernels.sparse`
# A gradient of another shape than its output, in fact an empty one, is not there.
_GRADS = "Tensor grad_out, Tensor grad_lse, Tensor grad_weights"

_library = torch.library.Library("graphattn", "FRAGMENT")
_library.define(f"block_attention({_INPUTS}) -> ({_OUTPUTS})", tags=[torch.Tag.pt2_compliant_tag])
_library.define(
    f"block_attention_backward({_GRADS}, {_OUTPUTS}, {_INPUTS}, bool with_bias) -> (Tensor grad_query, Tensor grad_key,"
    " Tensor grad_value, Tensor grad_bias)",
    tags=[torch.Tag.pt2_compliant_tag],
)
_forward = torch.ops.graphattn.block_attention.default
_backward = torch.ops.graphattn.block_attention_backward.default


def block_attention(*inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Attend over bands of consecutive keys: the schema above.

    Args:
        query, key, value: ``[B, Nq, H, D]``, ``[B, Nk, Hkv, D]``, ``[B, Nk, Hkv, Dv]`` with H a multiple of Hkv.
        bias: ``[Nq or 1, Nk or 1, H or 1]``, without ptr; what it holds where there is no edge is not read.
        ptr: int64 ``[sequences + 1]``, with as many keys as queries and offset 0.
        seed: int64 ``[1]``, read where dropout_p > 0.
        softcap: 0 for none.
        return_weights: without ptr.

    Returns:
        out ``[B, Nq, H, Dv]``, lse ``[B, Nq, H]`` and, if asked for, the weights before dropout ``[B, H, Nq, Nk]``,
        float32, or float64 for float64 inputs. Differentiable in reverse mode, twice in eager mode.
    """
    out, lse, _, weights = _forward(*inputs)
    return out, lse, weights


def blocks_of(
    ptr: Tensor | None, num_queries: int, num_keys: int, offset: int, before: int | None, after: int | None
) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of queries with the keys that these may see, and groups of blocks.

    Returns:
        int64 ``[blocks, 5]``: from which query to which, from which key to which, whether no edge is missing between
        them; int64 ``[groups, 3]``: from which block to which, and a parity: the groups of one parity share no key
        (nor query). Queries without a key are in no block.
    """
    query, query_end = np.array([0]), np.array([num_queries])
    key, key_end = np.array([0]), np.array([num_keys])
    if ptr is not None:
        line = ptr.numpy()
        query, query_end = key, key_end = line[:-1], line[1:]
    if after is not None:
        query, key_end = (
            np.maximum(query, key - after - offset),
            np.minimum(key_end, query_end + offset + after),
        )
    if before is not None:
        query_end, key = (
            np.minimum(query_end, key_end + before - offset),
            np.maximum(key, query + offset - before),
        )
    used = (query < query_end) & (key < key_end)
    query, query_end, key, key_end = query[used], query_end[used], key[used], key_end[used]

    count = -(-(query_end - query) // BLOCK)
    first = np.concatenate([[0], count.cumsum()])  # block of each sequence
    query, query_end, key, key_end = (np.repeat(x, count) for x in (query, query_end, key, key_end))
    query = query + BLOCK * (np.arange(first[-1]) - np.repeat(first[:-1], count))
    query_end = np.minimum(query + BLOCK, query_end)
    full = np.ones(first[-1], bool)
    if before is not None:
        key = np.maximum(key, query + offset - before)
        full &= key >= query_end - 1 + offset - before
    if after is not None:
        key_end = np.minimum(key_end, query_end + offset + after)
        full &= key_end <= query + offset + after + 1

    size = max(1, first[-1])
    if before is not None and after is not None:
        size = max(SEGMENT, -(-(before + after) // BLOCK))
    parts = -(-count // size)
    number = np.arange(parts.sum()) - np.repeat(parts.cumsum() - parts, parts)
    start = np.repeat(first[:-1], parts) + size * number
    groups = np.stack([start, np.minimum(start + size, np.repeat(first[1:], parts)), number % 2], 1)
    return np.stack([query, query_end, key, key_end, full], 1).astype(np.int64), groups.astype(np.int64)


def _edges(block: np.ndarray, offset: int, before: int | None, after: int | None) -> Tensor:
    """Which of the pairs ``[queries, keys]`` of a block are edges."""
    position = torch.arange(block[0], block[1]).view(-1, 1) + offset
    key = torch.arange(block[2], block[3])
    edges = torch.ones(position.size(0), key.size(0), dtype=torch.bool)
    if before is not None:
        edges &= key >= position - before
    if after is not None:
        edges &= key <= position + after
    return edges


def _wide(query: Tensor) -> torch.dtype:
    return torch.float64 if query.dtype == torch.float64 else torch.float32


@torch.library.impl(_library, "block_attention", "CPU")
def _forward_cpu(*inputs):
    from graphattn.kernels import blocks_cpu

    return blocks_cpu.forward(*inputs)


@torch.library.impl(_library, "block_attention_backward", "CPU")
def _backward_cpu(*arguments):
    from graphattn.kernels import blocks_cpu

    return blocks_cpu.backward(*arguments)


@torch.library.register_fake("graphattn::block_attention", lib=_library)
def _forward_fake(query, key, value, *rest):
    batch, num_queries, heads, _ = query.shape
    lse = query.new_empty(batch, num_queries, heads, dtype=_wide(query))
    out = lse.new_empty(batch, num_queries, heads, value.size(-1))
    weights = lse.new_empty(batch, heads, num_queries, key.size(1)) if rest[-1] else lse.new_empty(0)
    return out, lse, torch.empty_like(lse), weights


@torch.library.register_fake("graphattn::block_attention_backward", lib=_library)
def _backward_fake(*arguments):
    query, key, value, bias = arguments[7:11]
    if bias is None or not arguments[-1]:
        bias = query.new_empty(0)
    return tuple(x.new_empty(x.shape) for x in (query, key, value, bias))


_vmap = functools.partial(map_features, _forward)
torch.library.register_vmap("graphattn::block_attention", _vmap, lib=_library)

_NO_FORWARD_MODE = (
    "graph_attention's block kernel has no forward-mode derivative. Differentiate in reverse mode"
    " (torch.autograd.grad, backward)."
)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *inputs):
        with torch._C._AutoDispatchBelowAutograd():
            outputs = _forward(*inputs)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(outputs[2])
        ctx.rest = inputs[6:]
        ctx.save_for_backward(*outputs, *inputs[:6])
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        saved = ctx.saved_tensors  # once: checkpointing recomputes the forward pass at each access
        with_bias = ctx.needs_input_grad[3]
        given = (saved[0].new_empty(0) if grads[n] is None else grads[n] for n in (0, 1, 3))
        grads = _backward(*given, *saved, *ctx.rest, with_bias)
        return *grads[:3], grads[3] if with_bias else None, *[None] * 9

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, *arguments):
        with torch._C._AutoDispatchBelowAutograd():
            grads = _backward(*arguments)
        ctx.rest = arguments[13:]
        ctx.save_for_backward(*arguments[:13])
        return grads

    @staticmethod
    def backward(ctx, *grad_grads):
        tensors, with_bias = ctx.saved_tensors, ctx.rest[-1]
        # The outputs are functions of the inputs: their share is in the inputs' derivative.
        second = _second(
            tensors[:3], [*tensors[7:], *ctx.rest], [*grad_grads[:3], grad_grads[3] if with_bias else None]
        )
        return *second[:3], *[None] * 4, *second[3:], *[None] * 10

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)


_library.impl("block_attention", functools.partial(record, _Attention.apply, _forward), "Autograd")
_library.impl(
    "block_attention_backward", functools.partial(record, _AttentionBackward.apply, _backward), "Autograd"
)


@torch.autocast("cpu", enabled=False)
def _second(grads: Any, inputs: list[Any], grad_grads: list[Tensor | None]) -> list[Tensor | None]:
    """The derivative of the backward pass, block by block: of its three gradients and its four floating inputs."""
    query, key, value, bias, ptr, seed, offset, before, after, scale, softcap, dropout_p = inputs[:12]
    create_graph = torch.is_grad_enabled()

    def variable(x: Tensor) -> Tensor:
        """The part as a variable of its own, whatever else the whole is a function of."""
        return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()

    given = [*grads, query, key, value] + ([] if bias is None else [bias])
    totals = [torch.zeros_like(x, dtype=_wide(query)) for x in given]
    pairs = query.size(1), key.size(1)
    for block in blocks_of(ptr, *pairs, offset, before, after)[0]:
        edges = _edges(block, offset, before, after)
        queries, keys = slice(*block[:2]), slice(*block[2:4])
        for b in range(query.size(0)):
            keep = None
            if dropout_p > 0.0:
                number = torch.arange(*block[:2]).view(-1, 1) * pairs[1] + torch.arange(*block[2:4])
                number = b * math.prod(pairs) + number.flatten()
                keep = reference.dropout_factors(seed, number, 1, query.size(2), dropout_p)
                keep = keep.view(*edges.shape, -1).permute(2, 0, 1).to(_wide(query))

            def part(n: int, x: Tensor, b=b, queries=queries, keys=keys) -> Tensor:
                """What the n-th of the given has for this block."""
                if n == 6:
                    x = x if x.size(0) == 1 else x[queries]
                    return x if x.size(1) == 1 else x[:, keys]
                if n < 3 and x.numel() == 0:
                    return x
                if n == 2:
                    return x[b, :, queries, keys]
                return x[b, keys] if n in (4, 5) else x[b, queries]

            with torch.enable_grad():
                parts = [variable(part(n, x)) for n, x in enumerate(given)]
                outputs = _formula(*(*parts, None)[3:7], edges, keep, scale, softcap)  # pyright: ignore[reportCallIssue]
                used = [n for n, x in enumerate(outputs) if parts[n].shape == x.shape]
                first = torch.autograd.grad(
                    [outputs[n] for n in used],
                    parts[3:],
                    [parts[n] for n in used],
                    create_graph=True,
                    materialize_grads=True,
                )
            flowing = [(n, x) for n, x in enumerate(grad_grads[: len(first)]) if x is not None]
            second = torch.autograd.grad(
                [first[n] for n, _ in flowing],
                parts,
                [part(3 + n, x) for n, x in flowing],
                create_graph=create_graph,
                materialize_grads=True,
            )
            for n, (total, share) in enumerate(zip(totals, second)):
                part(n, total).add_(share)
    totals = [total.to(x.dtype) for total, x in zip(totals, given)]
    return [*totals, None] if bias is None else [*totals]


def _formula(query, key, value, bias, edges, keep, scale, softcap) -> tuple[Tensor, Tensor, Tensor]:
    """out ``[queries, H, Dv]``, lse ``[queries, H]`` and weights ``[H, queries, keys]`` of one block, by definition."""
    wide = _wide(query)
    query, key, value = (x.to(wide).transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.size(0) // x.size(0), 0) for x in (key, value))
    score = query @ key.mT * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias.to(wide).permute(2, 0, 1)
    score = score.masked_fill(~edges, -math.inf)
    peak = score.detach().amax(-1, keepdim=True)
    empty = peak == -math.inf
    weights = torch.exp(score - peak.masked_fill(empty, 0.0))
    total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    lse = (peak + total.log()).squeeze(-1)
    weights = weights / total
    out = (weights if keep is None else weights * keep) @ value
    return out.transpose(0, 1), lse.transpose(0, 1), weights
