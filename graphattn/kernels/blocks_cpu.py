"""Attention on blocks of consecutive keys on the CPU: matrix products, one block at a time on each thread.

Blocks with all their edges and no option go through PyTorch's flash attention, which keeps no score. It is slow with
masks and has no room for the rest, so other blocks form their scores, some queries at a time so that they stay in the
second-level cache, and form them again, the very same bits, in the backward pass:

    dV += (zP)ᵀ dO,    dS = P (z dO Vᵀ - δ),    dQ = scale · dS K,    dK += scale · dSᵀ Q,    δ = Σ_j P z dO Vᵀ - dlse

with dropout factors z. Jobs (a range of heads, a leading index, some blocks) are cut by the shapes alone and each is
computed on one thread, because what a matrix product rounds to can depend on the number of its threads. No two jobs
that run at a time write one place.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from graphattn.kernels.blocks import Block, dropout_factors, missing_edges, of_block, segments, sequences
from graphattn.kernels.threads import serially_in_parallel

_SCORES = 2**18  # scores worked on together
_JOBS = 16  # jobs that keep the threads busy without a cut by heads,
_SCORES_OF_JOB = 2**16  # of so many scores at least, for a job takes its time to begin
_PIECE = 2048  # keys of a sum
_FEW_KEYS = 256
_QUERIES = 2048  # of one flash call, so that a single head has more than one job

_softmax_backward = torch.ops.aten._softmax_backward_data.default
_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


@torch.autocast("cpu", enabled=False)  # scores and sums have a precision of their own
def forward(
    query,
    key,
    value,
    bias,
    ptr,
    seed,
    offset,
    before,
    after,
    scale,
    softcap,
    dropout_p,
    return_lse,
    return_weights,
) -> tuple[Tensor, Tensor, Tensor]:
    wide = torch.float64 if query.dtype == torch.float64 else torch.float32
    query, key, value = (_rows(x, wide) for x in (query, key, value))
    batch, num_queries, heads, _ = query.shape
    kv_heads, group = key.size(2), heads // key.size(2)
    weights = (
        query.new_zeros(batch, num_queries, key.size(1), heads) if return_weights else query.new_empty(0)
    )
    band = (offset, before, after)

    spans = sequences(ptr, num_queries, key.size(1), *band)
    whole = _is_whole(spans, query, key, offset, after)
    if _takes_flash(
        spans, whole, query, value, bias, before, scale, softcap, dropout_p, return_lse, return_weights
    ):
        if whole:
            everything = (x.transpose(1, 2) for x in (query, key, value))
            out, lse = _flash(*everything, is_causal=after is not None, scale=scale)
            return out.transpose(1, 2), lse.transpose(1, 2), weights
        out, lse = _nothing(query, value)

        def flash(b: int, head: int, end: int, parts: Sequence) -> None:
            of_query, of_key = _place(b, head * group, end * group), _place(b, head, end)
            total = None
            for queries, keys, causal in parts:
                x, y = _flash(
                    _view(query, of_query, queries),
                    _view(key, of_key, keys),
                    _view(value, of_key, keys),
                    is_causal=causal,
                    scale=scale,
                )
                if total is None:
                    total, log_total = x, y
                else:
                    both = torch.logaddexp(log_total, y)
                    total = total * (log_total - both).exp().unsqueeze(-1) + x * (y - both).exp().unsqueeze(
                        -1
                    )
                    log_total = both
            if total is not None:
                _view(out, of_query, queries).copy_(total)
                _view(lse.unsqueeze(-1), of_query, queries).copy_(log_total.unsqueeze(-1))

        calls = []
        for span in spans:
            for start in range(span[0], span[1], _QUERIES):
                part = (start, min(start + _QUERIES, span[1]), *span[2:])
                calls.append((_cost(part), _parts(part, offset, after)))
        _run(flash, _by_head(calls, batch, kv_heads))
        return out, lse, weights

    out, lse = _nothing(query, value)
    bias = None if bias is None else bias.to(wide)
    drawn = seed.item() if dropout_p > 0.0 else 0
    masks = _Masks(band, group)

    def matmul(b: slice, head: int, end: int, block: Block) -> None:
        of_query, of_key = (b, slice(head * group, end * group)), (b, slice(head, end))
        keys, chunk = slice(block.key, block.key_end), slice(block.query, block.query_end)
        scores, _ = _scores(
            _grouped(query, of_query, block, group), _rows_of(key, of_key, keys), block, masks, bias, of_query[1],
            scale, softcap,
        )  # fmt: skip
        shape = _shape(of_query, block)
        if return_lse:
            lse[b, chunk, of_query[1]] = torch.logsumexp(scores, -1).view(shape[:3]).transpose(1, 2)
        p = _softmax(scores)
        if return_weights:
            weights[b, chunk, keys, of_query[1]] = p.view(shape).permute(0, 2, 3, 1)
        if dropout_p > 0.0:
            p.mul_(dropout_factors(drawn, block, *of_query, (batch, heads), dropout_p, wide).view(p.shape))
        x = _over_keys(p, _rows_of(value, of_key, keys))
        _view(out, of_query, chunk).copy_(x.view(*shape[:3], x.size(2)))

    blocks = [block for _, blocks in segments(ptr, num_queries, key.size(1), *band) for block in blocks]
    jobs, enough = [], _enough(blocks, batch * heads)
    for block in blocks:
        together = _together(block, group, kv_heads, batch * len(blocks) >= enough)
        few = -(-batch * len(blocks) // enough)
        leading = min(few, _leading(block, group * min(together, kv_heads)))
        jobs += [(slice(*b), *r, block) for r in _ranges(kv_heads, together) for b in _ranges(batch, leading)]
    _run(matmul, jobs)
    return out, lse, weights


@torch.autocast("cpu", enabled=False)
def backward(
    grad_out, grad_lse, grad_weights, out, lse, query, key, value, bias, ptr, seed, offset, before, after, scale,
    softcap, dropout_p, return_lse, return_weights, with_bias,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    wide = out.dtype
    inputs = (query, key, value, bias)
    query, key, value = (_rows(x, wide) for x in (query, key, value))
    batch, num_queries, heads, _ = query.shape
    kv_heads, group = key.size(2), heads // key.size(2)
    if grad_out.shape != out.shape:
        grad_out = torch.zeros_like(out)
    grad_out = _rows(grad_out, wide)
    grad_bias = query.new_empty(0)
    band = (offset, before, after)

    spans = sequences(ptr, num_queries, key.size(1), *band)
    whole = _is_whole(spans, query, key, offset, after)
    by_flash = _takes_flash(
        spans, whole, query, value, bias, before, scale, softcap, dropout_p, return_lse, return_weights
    )
    if by_flash and whole:
        everything = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
        grads = _flash_backward(*everything, lse.transpose(1, 2), 0.0, after is not None, scale=scale)
        grads = [grad.transpose(1, 2).to(x.dtype).contiguous() for grad, x in zip(grads, inputs)]
        return grads[0], grads[1], grads[2], inputs[0].new_empty(0)
    grad_query, grad_key, grad_value = (torch.zeros(x.shape, dtype=wide) for x in (query, key, value))
    if by_flash:

        def flash(b: int, head: int, end: int, parts: Sequence) -> None:
            of_query, of_key = _place(b, head * group, end * group), _place(b, head, end)
            for queries, keys, causal in parts:
                grads = _flash_backward(
                    *(_view(x, of_query, queries) for x in (grad_out, query)),
                    *(_view(x, of_key, keys) for x in (key, value)),
                    _view(out, of_query, queries),
                    _view(lse.unsqueeze(-1), of_query, queries).squeeze(-1),
                    0.0,
                    causal,
                    scale=scale,
                )
                _view(grad_query, of_query, queries).add_(grads[0])
                _view(grad_key, of_key, keys).add_(grads[1])
                _view(grad_value, of_key, keys).add_(grads[2])

        _run(flash, _by_head([(_cost(span), _parts(span, offset, after)) for span in spans], batch, kv_heads))
    else:
        bias = None if bias is None else bias.to(wide)
        drawn = seed.item() if dropout_p > 0.0 else 0
        masks = _Masks(band, group)
        # Jobs of different heads that add to one number do so on numbers of their own, which are summed after.
        # There are few of them, as each is of the size of the bias.
        shared = bias is not None and bias.size(2) == 1
        if bias is not None and with_bias:
            grad_bias = bias.new_zeros(min(kv_heads, 4) if shared else 1, *bias.shape)

        def matmul(b: slice, head: int, end: int, blocks: Sequence[Block], copy: int) -> None:
            for block in blocks:
                for low, high in _ranges(end - head, _together(block, group, end - head, True)):
                    leading = _leading(block, group * (high - low))
                    for first, last in _ranges(b.stop - b.start, leading):
                        part(slice(b.start + first, b.start + last), head + low, head + high, block, copy)

        def part(b: slice, head: int, end: int, block: Block, copy: int) -> None:
            of_query, of_key = (b, slice(head * group, end * group)), (b, slice(head, end))
            keys, chunk = slice(block.key, block.key_end), slice(block.query, block.query_end)
            q, g = (_grouped(x, of_query, block, group) for x in (query, grad_out))
            k, v = (_rows_of(x, of_key, keys) for x in (key, value))
            scores, slope = _scores(q, k, block, masks, bias, of_query[1], scale, softcap)
            shape = _shape(of_query, block)
            p = _softmax(scores)
            ds = torch.bmm(g, v.mT, out=scores)
            dropped = p
            if dropout_p > 0.0:
                keep = dropout_factors(drawn, block, *of_query, (batch, heads), dropout_p, wide).view(p.shape)
                ds.mul_(keep)
                dropped = p * keep
            _add_product(_view(grad_value, of_key, keys), dropped, g, group)
            if grad_weights.numel():
                flowing = grad_weights[b, chunk, keys, of_query[1]].permute(0, 3, 1, 2).reshape(p.shape)
                mask = masks.of(block, q.dtype)
                # What flows into a place without an edge counts for nothing, not even if it is NaN.
                ds.add_(flowing if mask is None else flowing.masked_fill(mask == -math.inf, 0.0))
            ds = _softmax_backward(ds, p, -1, wide)
            if grad_lse.numel():
                ds.addcmul_(p, grad_lse[b, chunk, of_query[1]].transpose(1, 2).reshape(*p.shape[:2], 1))
            if with_bias:
                total = of_block(grad_bias[copy], block, of_query[1])
                total.add_(ds.view(shape).sum_to_size(1, *total.shape)[0])
            if slope is not None:
                ds.mul_(slope)
            x = _over_keys(ds.mul_(scale), k)
            _view(grad_query, of_query, chunk).copy_(x.view(*shape[:3], x.size(2)))
            _add_product(_view(grad_key, of_key, keys), ds, q, group)

        groups = segments(ptr, num_queries, key.size(1), *band)
        for parity in (0, 1):
            chosen = [blocks for n, blocks in groups if n == parity]
            if with_bias:
                # One job adds all that goes into the bias of a head.
                everything = [block for blocks in chosen for block in blocks]
                ranges = list(_ranges(kv_heads, -(-kv_heads // len(grad_bias)) if shared else 1))
                jobs = [
                    (slice(0, batch), *r, everything, n if shared else 0)
                    for n, r in enumerate(ranges)
                    if everything
                ]
            else:
                # Pairs of a leading index and a head in a job.
                enough = _enough([block for blocks in chosen for block in blocks], batch * heads)
                size = -(-batch * len(chosen) * kv_heads // enough)
                jobs = [
                    (slice(*b), *r, blocks, 0)
                    for blocks in sorted(chosen, key=_size, reverse=True)
                    for b in _ranges(batch, max(1, size // kv_heads))
                    for r in _ranges(kv_heads, min(kv_heads, size))
                ]
            _run(matmul, jobs)
        if with_bias:
            grad_bias = grad_bias.sum(0).to(inputs[3].dtype)
    return (
        grad_query.to(inputs[0].dtype),
        grad_key.to(inputs[1].dtype),
        grad_value.to(inputs[2].dtype),
        grad_bias if with_bias else inputs[0].new_empty(0),
    )


def _takes_flash(
    spans, whole, query, value, bias, before, scale, softcap, dropout_p, return_lse, return_weights
) -> bool:
    """Whether PyTorch's flash attention has all that is asked for; called again and again for few keys it is no faster.

    It removes edges before it multiplies by the scale, which must not turn -inf around. Where heads share few keys, its
    long sums over all of them are less exact.
    """
    options = bias is not None or softcap or dropout_p or return_lse or return_weights
    whole = whole and query.size(2) == value.size(2)
    return (
        before is None
        and not options
        and scale > 0.0
        and query.size(3) == value.size(3)
        and (whole or any(key_end - key > _FEW_KEYS for _, _, key, key_end in spans))
    )


def _is_whole(spans, query: Tensor, key: Tensor, offset: int, after: int | None) -> bool:
    """Whether one flash call on all there is does it all, in the caller's thread and those that it starts by itself.

    With a single head it would start them within its matrix products, whose results depend on them.
    """
    square = after is None or offset + after == 0
    one = spans == [(0, query.size(1), 0, key.size(1))] and query.size(0) * query.size(2) > 1
    return one and square


def _over_keys(weights: Tensor, x: Tensor) -> Tensor:
    """The product ``[heads, queries, keys] @ [heads, keys, dim]``; in one go, long sums would lose digits."""
    if x.size(1) <= _PIECE:
        return torch.bmm(weights, x)
    total = torch.zeros(*weights.shape[:2], x.size(2), dtype=torch.float64)
    for part, rows in zip(weights.split(_PIECE, 2), x.split(_PIECE, 1)):
        total += torch.bmm(part, rows)
    return total.to(x.dtype)


def _nothing(query: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse of queries without an edge."""
    rows = query.shape[:3]
    return query.new_zeros(*rows, value.size(3)), query.new_full(rows, -math.inf)


def _rows(x: Tensor, wide: torch.dtype) -> Tensor:
    """The tensor in the precision of the scores, its rows such as matrix products take them."""
    x = x.to(wide)
    if x.stride(3) == 1 and x.stride(1) >= x.size(3):
        return x
    return x.contiguous()


_Place = tuple[slice, slice]  # leading indices and heads


def _place(b: int, head: int, end: int) -> _Place:
    return slice(b, b + 1), slice(head, end)


def _shape(place: _Place, block: Block) -> tuple[int, int, int, int]:
    """Of the scores of a block: leading indices, heads, queries, keys."""
    b, heads = place
    sizes = block.query_end - block.query, block.key_end - block.key
    return b.stop - b.start, heads.stop - heads.start, *sizes


def _view(x: Tensor, place: _Place, nodes: slice) -> Tensor:
    """Some nodes of some leading indices and heads as PyTorch's attention takes them: ``[B, heads, nodes, dim]``."""
    return x[place[0], nodes, place[1]].transpose(1, 2)


def _rows_of(x: Tensor, place: _Place, nodes: slice) -> Tensor:
    """The same as batched products take them, ``[B * heads, nodes, dim]``: a copy only of several leading indices."""
    return _view(x, place, nodes).flatten(0, 1)


def _grouped(x: Tensor, place: _Place, block: Block, group: int) -> Tensor:
    """The queries of a block, those of heads that share a key one below the other: ``[B * kv_heads, rows, dim]``."""
    x = _rows_of(x, place, slice(block.query, block.query_end))
    return x if group == 1 else x.reshape(x.size(0) // group, group * x.size(1), x.size(2))


def _add_product(total: Tensor, x: Tensor, y: Tensor, group: int) -> None:
    """``total += xᵀ y``, head by head where several share a key: long sums in one go would lose digits."""
    if group == 1 and total.size(0) == 1:
        total[0].baddbmm_(x.mT, y)
        return
    x, y = (z.reshape(z.size(0) * group, z.size(1) // group, z.size(2)) for z in (x, y))
    product = torch.bmm(x.mT, y).view(*total.shape[:2], group, *total.shape[2:])
    total.add_(product.sum(2) if group > 1 else product.squeeze(2))


class _Masks:
    """`missing_edges` of the blocks of one call, repeated for the heads that share a key.

    Blocks of a window lie alike and share one mask; where a side is unbounded, each has its own and none is kept.
    """

    def __init__(self, band: tuple[int, int | None, int | None], group: int) -> None:
        self.band, self.group = band, group
        self.known: dict[tuple[int, int, int], Tensor] | None = None if None in band else {}

    def of(self, block: Block, dtype: torch.dtype) -> Tensor | None:
        place = (block.query_end - block.query, block.key_end - block.key, block.key - block.query)
        if self.known is not None and place in self.known:
            return self.known[place]
        mask = missing_edges(block, *self.band, dtype)
        if mask is not None:
            mask = mask.repeat(self.group, 1) if self.group > 1 else mask
            if self.known is not None:
                self.known[place] = mask
        return mask


def _scores(q, k, block, masks, bias, heads, scale, softcap) -> tuple[Tensor, Tensor | None]:
    """The scores ``[B * kv_heads, rows, keys]`` of a block, and the slope of the soft cap at them."""
    mask, slope = masks.of(block, q.dtype), None
    if mask is not None and bias is None and not softcap:
        return torch.baddbmm(mask, q, k.mT, alpha=scale), None
    scores = torch.bmm(q, k.mT).mul_(scale)
    if softcap:
        scores.div_(softcap).tanh_()
        slope = scores.square().neg_().add_(1.0)
        scores.mul_(softcap)
    if bias is not None:
        by_head = scores.view(-1, heads.stop - heads.start, block.query_end - block.query, scores.size(2))
        by_head.add_(of_block(bias, block, heads))
    if mask is not None:
        scores.masked_fill_(mask < 0.0, -math.inf)
    return scores, slope


def _softmax(scores: Tensor) -> Tensor:
    p = torch.softmax(scores, -1)
    if p[..., 0].isnan().any():  # a row of NaN: 0 where every score is -inf
        p.masked_fill_(scores.amax(-1, keepdim=True) == -math.inf, 0.0)
    return p


def _parts(
    span: tuple[int, int, int, int], offset: int, after: int | None
) -> list[tuple[slice, slice, bool]]:
    """Queries and keys as products that flash attention takes: all pairs, and causal from the top left corner."""
    query, query_end, key, key_end = span
    if after is None:
        return [(slice(query, query_end), slice(key, key_end), False)]
    corner = query + offset + after  # the last key that the first query sees
    key_end = min(key_end, query_end + offset + after)
    parts = [(key, min(corner, key_end), False), (max(corner, key), key_end, True)]
    return [(slice(query, query_end), slice(low, high), causal) for low, high, causal in parts if low < high]


def _cost(span: tuple[int, int, int, int]) -> int:
    return (span[1] - span[0]) * (span[3] - span[2])


def _size(blocks: Sequence[Block]) -> int:
    return sum(_cost(block[:4]) for block in blocks)


def _by_head(calls: list[tuple[int, list]], batch: int, kv_heads: int) -> list[tuple]:
    """Jobs, the longest first: all heads together where there are many calls, or little to do in one."""
    calls = sorted(calls, key=lambda call: call[0], reverse=True)
    return [
        (b, *heads, parts)
        for cost, parts in calls
        for b in range(batch)
        for heads in _ranges(kv_heads, kv_heads if batch * len(calls) >= _JOBS or cost < _SCORES // 16 else 1)
    ]


def _enough(blocks: Sequence[Block], heads: int) -> int:
    """How many jobs keep the threads busy."""
    return max(1, min(_JOBS, _size(blocks) * heads // _SCORES_OF_JOB))


def _together(block: Block, group: int, kv_heads: int, busy: bool) -> int:
    """How many key heads of a block to work on together, if the threads are busy without a cut by heads or not."""
    most = max(1, _SCORES // max(1, _cost(block[:4]) * group))
    return most if busy else min(most, -(-kv_heads // 4))


def _leading(block: Block, heads: int) -> int:
    """How many leading indices of a block to work on together: one would keep a thread busy with calls."""
    return max(1, _SCORES // max(1, _cost(block[:4]) * heads))


def _ranges(heads: int, most: int) -> Iterable[tuple[int, int]]:
    """Cut the heads, or leading indices, into ranges of about one size, at most so many each."""
    parts = -(-heads // max(1, most))
    cuts = [heads * n // parts for n in range(parts + 1)] if parts else []
    return itertools.pairwise(cuts)


def _run(job: Callable[..., None], items: Iterable[tuple]) -> None:
    """Do the jobs on as many threads as PyTorch uses, each serially; threads take job after job."""
    items = list(items)
    threads, inference = min(torch.get_num_threads(), len(items)), torch.is_inference_mode_enabled()
    left = iter(items)

    def work() -> None:
        with torch.inference_mode(inference), torch.no_grad():
            for item in left:
                job(*item)

    if torch.get_num_threads() == 1:
        work()
    elif items:
        serially_in_parallel(work, threads)
