"""Attention on bands of consecutive keys as PyTorch operators: complete graphs, cliques, causal ones, wide windows.

Query i, at position ``offset + i``, attends to the keys ``offset + i - before`` to ``offset + i + after`` of its
sequence, None being all of them on that side. Sequences are packed along the nodes, sequence b being the nodes
``ptr[b]:ptr[b + 1]``; without ``ptr`` there is one, and keys and queries may differ in number.

``graphattn::block_attention`` works on blocks of some queries and all keys that these may see, and saves its inputs,
out and lse: memory of a block at a time, never of all pairs. `graphattn.kernels.blocks_cpu` has the arithmetic. The
derivative of its backward pass, which second derivatives ask for, is the one of the formula at the end of this file.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from graphattn.kernels.sparse import map_features

BLOCK = 64  # queries of a block
SEGMENT = 8  # blocks of a segment, at least

_INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor? ptr, Tensor? seed, SymInt offset, int? before,"
    " int? after, float scale, float softcap, float dropout_p, bool return_lse, bool return_weights"
)
_OUTPUTS = "Tensor out, Tensor lse, Tensor weights"
# A gradient of another shape than its output, in fact an empty one, is not there.
_GRADS = "Tensor grad_out, Tensor grad_lse, Tensor grad_weights"

_library = torch.library.Library("graphattn", "FRAGMENT")
_library.define(f"block_attention({_INPUTS}) -> ({_OUTPUTS})", tags=[torch.Tag.pt2_compliant_tag])
_library.define(
    f"block_attention_backward({_GRADS}, Tensor out, Tensor lse, {_INPUTS}, bool with_bias) -> (Tensor grad_query,"
    " Tensor grad_key, Tensor grad_value, Tensor grad_bias)",
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

    Returns:
        out ``[B, Nq, H, Dv]``, lse ``[B, Nq, H]`` and weights ``[B, Nq, Nk, H]``, float32, or float64 for float64
        inputs. Without return_weights weights is empty, and without return_lse lse means nothing. Differentiable in
        reverse mode, twice in eager mode.
    """
    return _forward(*inputs)


class Block(NamedTuple):
    """Queries and all keys that they may see, as ranges; the number of the block; whether edges are missing in it."""

    query: int
    query_end: int
    key: int
    key_end: int
    number: int
    full: bool


def sequences(ptr, num_queries, num_keys, offset, before, after) -> list[tuple[int, int, int, int]]:
    """The queries that have a key and the keys that have a query, as ranges, of each sequence that has any."""
    bounds = [(0, num_queries, 0, num_keys)]
    if ptr is not None:
        line = ptr.tolist()
        bounds = [(low, end, low, end) for low, end in itertools.pairwise(line)]
    used = []
    for query, query_end, key, key_end in bounds:
        if after is not None:
            query = max(query, key - after - offset)
            key_end = min(key_end, query_end + offset + after)
        if before is not None:
            query_end = min(query_end, key_end + before - offset)
            key = max(key, query + offset - before)
        if query < query_end and key < key_end:
            used.append((query, query_end, key, key_end))
    return used


def segments(ptr, num_queries, num_keys, offset, before, after) -> list[tuple[int, list[Block]]]:
    """Blocks in groups, each with a parity: the groups of one parity share no key (nor query)."""
    groups, number = [], 0
    for first, query_end, low, high in sequences(ptr, num_queries, num_keys, offset, before, after):
        blocks = []
        for query in range(first, query_end, BLOCK):
            end = min(query + BLOCK, query_end)
            key = low if before is None else max(low, query + offset - before)
            key_end = high if after is None else min(high, end + offset + after)
            full = (before is None or key >= end - 1 + offset - before) and (
                after is None or key_end <= query + offset + after + 1
            )
            blocks.append(Block(query, end, key, key_end, number, full))
            number += 1
        size = len(blocks)
        if before is not None and after is not None:
            size = max(SEGMENT, -(-(before + after) // BLOCK))
        for n, start in enumerate(range(0, len(blocks), size)):
            groups.append((n % 2, blocks[start : start + size]))
    return groups


def missing_edges(
    block: Block, offset: int, before: int | None, after: int | None, dtype: torch.dtype
) -> Tensor | None:
    """What to add to the scores ``[queries, keys]`` of a block: -inf where there is no edge, else 0. None for all 0."""
    if block.full:
        return None
    infinite = torch.full((block.query_end - block.query, block.key_end - block.key), -math.inf, dtype=dtype)
    position = block.query + offset - block.key  # of the first query among the keys
    sides = []
    if before is not None:
        sides.append(infinite.tril(position - before - 1))
    if after is not None:
        sides.append(infinite.triu(position + after + 1))
    return sides[0] if len(sides) == 1 else sides[0].add_(sides[1])


def dropout_factors(
    seed: int, block: Block, leading: slice, heads: slice, sizes: Sequence[int], p: float, dtype: torch.dtype
):
    """Draw the factors ``[B * heads, queries, keys]`` of a block: 0 with probability p, else 1 / (1 - p).

    Every block, leading index b and head draws from a generator of its own, so the draw can be made again in any order.
    ``sizes`` are the numbers of leading indices and heads.
    """
    streams = [
        (block.number * sizes[0] + b) * sizes[1] + head
        for b in range(sizes[0])[leading]
        for head in range(sizes[1])[heads]
    ]
    drawn = torch.empty(len(streams), block.query_end - block.query, block.key_end - block.key, dtype=dtype)
    generator = torch.Generator()
    for factors, stream in zip(drawn, streams):
        generator.manual_seed((seed + stream * 0x9E3779B97F4A7C15) % 2**63)
        factors.uniform_(generator=generator)
    return (drawn >= p).to(dtype).mul_(1.0 / (1.0 - p) if p < 1.0 else 0.0)


def of_block(bias: Tensor, block: Block, heads: slice) -> Tensor:
    """What a bias ``[Nq or 1, Nk or 1, H or 1]``, or its gradient, has for a block: ``[heads, queries, keys]``."""
    if bias.size(0) != 1:
        bias = bias[block.query : block.query_end]
    if bias.size(1) != 1:
        bias = bias[:, block.key : block.key_end]
    if bias.size(2) != 1:
        bias = bias[:, :, heads]
    return bias.permute(2, 0, 1)


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
    wide = query.new_empty(0, dtype=_wide(query))
    return (
        wide.new_empty(batch, num_queries, heads, value.size(-1)),
        wide.new_empty(batch, num_queries, heads),
        wide.new_empty(batch, num_queries, key.size(1), heads) if rest[-1] else wide,
    )


@torch.library.register_fake("graphattn::block_attention_backward", lib=_library)
def _backward_fake(*arguments):
    query, key, value, bias = arguments[5:9]
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
        ctx.rest = [None if isinstance(x, Tensor) else x for x in inputs]
        tensors = (x if isinstance(x, Tensor) else None for x in inputs)
        ctx.save_for_backward(outputs[0], outputs[1], *tensors)
        ctx.has_weights = inputs[-1]
        if not inputs[-2]:
            ctx.mark_non_differentiable(outputs[1])
        return outputs

    @staticmethod
    def backward(ctx, *grads):
        out, lse, *tensors = (
            ctx.saved_tensors
        )  # once: checkpointing recomputes the forward pass at each access
        inputs: list[Any] = [rest if tensor is None else tensor for tensor, rest in zip(tensors, ctx.rest)]
        with_bias = inputs[3] is not None and ctx.needs_input_grad[3]
        grads = [out.new_empty(0) if grad is None else grad for grad in grads]
        grads = list(_backward(*grads, out, lse, *inputs, with_bias))
        return *grads[:3], grads[3] if with_bias else None, *[None] * (len(inputs) - 4)

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
        grads, inputs, with_bias = arguments[:3], arguments[5:-1], arguments[-1]
        # out and lse are functions of the inputs: their share is in the inputs' derivative.
        second = _second(grads, inputs, [*grad_grads[:3], grad_grads[3] if with_bias else None])
        return *second[:3], None, None, *second[3:], *[None] * (len(arguments) - 9)

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(_NO_FORWARD_MODE)


torch.library.impl(_library, "block_attention", "Autograd")(_Attention.apply)
torch.library.impl(_library, "block_attention_backward", "Autograd")(_AttentionBackward.apply)


@torch.autocast("cpu", enabled=False)
def _second(grads: list[Tensor], inputs: list[Any], grad_grads: list[Tensor | None]) -> list[Tensor | None]:
    """The derivative of the backward pass, block by block: of its three gradients and its four floating inputs."""
    query, key, value, bias, ptr, seed, offset, before, after, scale, softcap, dropout_p = inputs[:12]
    create_graph = torch.is_grad_enabled()

    def variable(x: Tensor) -> Tensor:
        """The part as a variable of its own, whatever else the whole is a function of."""
        return x.view_as(x) if create_graph and x.requires_grad else x.detach().requires_grad_()

    given = [*grads, query, key, value] + ([] if bias is None else [bias])
    totals = [torch.zeros_like(x, dtype=_wide(query)) for x in given]
    sizes = (query.size(0), query.size(2))
    drawn = seed.item() if dropout_p > 0.0 else 0
    for _, blocks in segments(ptr, query.size(1), key.size(1), offset, before, after):
        for block in blocks:
            mask = missing_edges(block, offset, before, after, _wide(query))
            for b in range(query.size(0)):
                queries, keys = slice(block.query, block.query_end), slice(block.key, block.key_end)
                keep = None
                if dropout_p > 0.0:
                    keep = dropout_factors(
                        drawn, block, slice(b, b + 1), slice(None), sizes, dropout_p, _wide(query)
                    )

                def part(n: int, x: Tensor, b=b, block=block, queries=queries, keys=keys) -> Tensor:
                    """What the n-th of the given has for this block."""
                    if n == 6:
                        return of_block(x, block, slice(None))
                    if n < 3 and x.numel() == 0:
                        return x
                    if n == 2:
                        return x[b, queries, keys]
                    return x[b, keys] if n in (4, 5) else x[b, queries]

                with torch.enable_grad():
                    parts = [variable(part(n, x)) for n, x in enumerate(given)]
                    outputs = _formula(
                        parts[3],
                        parts[4],
                        parts[5],
                        parts[6] if len(parts) > 6 else None,
                        mask,
                        keep,
                        scale,
                        softcap,
                    )
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


def _formula(query, key, value, bias, mask, keep, scale, softcap) -> tuple[Tensor, Tensor, Tensor]:
    """out ``[queries, H, Dv]``, lse ``[queries, H]`` and weights ``[queries, keys, H]`` of one block, by definition."""
    wide = _wide(query)
    query, key, value = (x.to(wide).transpose(0, 1) for x in (query, key, value))
    key, value = (x.repeat_interleave(query.size(0) // x.size(0), 0) for x in (key, value))
    score = query @ key.mT * scale
    if softcap:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias.to(wide)
    if mask is not None:
        score = score.masked_fill(mask < 0.0, -math.inf)
    peak = score.detach().amax(-1, keepdim=True)
    empty = peak == -math.inf
    weights = torch.exp(score - peak.masked_fill(empty, 0.0))
    total = weights.sum(-1, keepdim=True).masked_fill(empty, 1.0)
    lse = (peak + total.log()).squeeze(-1)
    weights = weights / total
    out = (weights if keep is None else weights * keep) @ value
    if mask is not None:  # what flows into a place without an edge counts for nothing, not even if it is NaN
        weights = weights.masked_fill(mask < 0.0, 0.0)
    return out.transpose(0, 1), lse.transpose(0, 1), weights.permute(1, 2, 0)
