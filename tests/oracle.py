"""The operator once more, written from its definition and sharing no code with the package.

`attention_by_loops` is the definition, one edge at a time. `attention` is the same over all listed edges at
once and differentiable; it is the oracle of the operator's tests. `Case` is one input of the operator,
`results` everything that comes back from it, and `assert_agrees` the contract: values and every gradient.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor


def attention_by_loops(
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    edges: list[tuple[int, int]],
    *,
    bias: np.ndarray | None = None,
    edge_attr: np.ndarray | None = None,
    edge_projection: np.ndarray | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    keep: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Output, lse and weights by a literal loop in Python floats; `edges` are (key, query) pairs."""
    *leading, num_queries, heads, dim = query.shape
    group = heads // key.shape[-2]
    factor: float = dim**-0.5 if scale is None else scale
    out = np.zeros((*leading, num_queries, heads, value.shape[-1]))
    lse = np.full((*leading, num_queries, heads), -math.inf)
    weights = np.zeros((*leading, len(edges), heads))
    for batch in np.ndindex(*leading):
        for i in range(num_queries):
            for h in range(heads):
                terms = []
                for e, (source, target) in enumerate(edges):
                    if target != i:
                        continue
                    k = [float(x) for x in key[batch][source, h // group]]
                    v = [float(x) for x in value[batch][source, h // group]]
                    if edge_attr is not None:
                        assert edge_projection is not None
                        for f in range(edge_attr.shape[1]):
                            for d in range(dim):
                                feature = float(edge_attr[e, f]) * float(edge_projection[h, f, d])
                                k[d] += feature
                                v[d] += feature
                    score = factor * sum(float(a) * b for a, b in zip(query[batch][i, h], k))
                    if softcap is not None:
                        score = softcap * math.tanh(score / softcap)
                    if bias is not None:
                        score += float(np.broadcast_to(bias, (len(edges), heads))[e, h])
                    if score > -math.inf:
                        terms.append((e, score, v))
                if not terms:
                    continue
                largest = max(score for _, score, _ in terms)
                total = sum(math.exp(score - largest) for _, score, _ in terms)
                lse[batch][i, h] = largest + math.log(total)
                for e, score, v in terms:
                    weight = math.exp(score - largest) / total
                    weights[batch][e, h] = weight
                    if keep is not None:
                        weight *= keep[batch][e, h]
                    out[batch][i, h] += weight * np.array(v)
    return out, lse, weights


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    *,
    bias: Tensor | None = None,
    edge_attr: Tensor | None = None,
    edge_projection: Tensor | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    keep: Tensor | None = None,
    precision: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, lse and weights over the listed edges, computed in `precision`.

    `keep` [..., E, H] multiplies the weights (dropout: 0 or 1 / (1 - p)). The output is rounded to the dtype
    of `query`, so that gradients are rounded once too, at the operands.
    """
    source, target = edge_index
    num_queries, heads = query.shape[-3], query.shape[-2]
    factor: float = query.shape[-1] ** -0.5 if scale is None else scale
    q, k, v = (x.to(precision) for x in (query, key, value))
    q = q[..., target, :, :]
    k = k[..., source, :, :].repeat_interleave(heads // key.shape[-2], -2)
    v = v[..., source, :, :].repeat_interleave(heads // value.shape[-2], -2)
    if edge_attr is not None:
        assert edge_projection is not None
        feature = torch.einsum("ef,hfd->ehd", edge_attr.to(precision), edge_projection.to(precision))
        k, v = k + feature, v + feature
    score = factor * (q * k).sum(-1)
    if softcap is not None:
        score = softcap * torch.tanh(score / softcap)
    if bias is not None:
        score = score + bias.to(precision)

    def per_query(x: Tensor) -> Tensor:
        """Sum over the edges of each query."""
        return x.new_zeros(*x.shape[: query.dim() - 3], num_queries, *x.shape[query.dim() - 2 :]).index_add(
            query.dim() - 3, target, x
        )

    largest = score.new_full((*query.shape[:-3], num_queries, heads), -math.inf)
    index = target.view(-1, 1).expand_as(score)
    largest = largest.scatter_reduce(-2, index, score.detach(), "amax")
    largest = largest.masked_fill(largest == -math.inf, 0.0)
    exponential = torch.exp(score - largest[..., target, :])
    total = per_query(exponential)
    empty = total == 0
    total = total.masked_fill(empty, 1.0)
    lse = (torch.log(total) + largest).masked_fill(empty, -math.inf)
    weights = exponential / total[..., target, :]
    kept = weights if keep is None else weights * keep.to(precision)
    out = per_query(kept.unsqueeze(-1) * v)
    return out.to(query.dtype), lse, weights


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


@dataclass(frozen=True)
class Case:
    """One input: a graph as its edges, the operands, the settings, and the gradients that flow in."""

    edge_index: Tensor
    num_keys: int
    num_queries: int
    operands: dict[str, Tensor]
    settings: dict[str, Any]
    grad_out: Tensor
    grad_lse: Tensor

    @property
    def dtype(self) -> torch.dtype:
        return self.operands["query"].dtype

    def to(self, dtype: torch.dtype) -> "Case":
        return replace(
            self,
            operands={name: x.to(dtype) for name, x in self.operands.items()},
            grad_out=self.grad_out.to(dtype),
            grad_lse=self.grad_lse.to(statistics_dtype(dtype)),
        )


def draw_case(
    graph: tuple[Tensor, int, int],
    *,
    dtype: torch.dtype = torch.float64,
    heads: int = 2,
    kv_heads: int | None = None,
    dim: int = 8,
    value_dim: int | None = None,
    leading: tuple[int, ...] = (),
    bias: tuple[str, str] | None = None,
    removed: float = 0.0,
    edge_dim: int | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    seed: int = 0,
) -> Case:
    """Normal operands for a graph `(edge_index, num_keys, num_queries)`.

    `bias` says which axes are full, e.g. `("E", "1")`; a share `removed` of its entries is -inf. The numbers
    fit in `dtype` and in float32, so a run in either starts from the same ones.
    """
    edge_index, num_keys, num_queries = graph
    num_edges = edge_index.shape[1]
    kv_heads = heads if kv_heads is None else kv_heads
    value_dim = dim if value_dim is None else value_dim
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    operands = {
        "query": normal(*leading, num_queries, heads, dim),
        "key": normal(*leading, num_keys, kv_heads, dim),
        "value": normal(*leading, num_keys, kv_heads, value_dim),
    }
    if bias is not None:
        shape = tuple({"E": num_edges, "H": heads, "1": 1}[axis] for axis in bias)
        operands["bias"] = normal(*shape)
        dropped = torch.rand(shape, generator=generator) < removed
        operands["bias"].masked_fill_(dropped, -math.inf)
    if edge_dim is not None:
        operands["edge_attr"] = normal(num_edges, edge_dim)
        operands["edge_projection"] = normal(heads, edge_dim, dim) * 0.5
    settings = {name: x for name, x in (("scale", scale), ("softcap", softcap)) if x is not None}
    grad_out = normal(*leading, num_queries, heads, value_dim)
    grad_lse = normal(*leading, num_queries, heads).to(statistics_dtype(dtype))
    return Case(edge_index, num_keys, num_queries, operands, settings, grad_out, grad_lse)


Operator = Callable[..., tuple[Tensor, Tensor]]
"""`(case, operands) -> (out, lse)`, where `operands` are those of the case with gradients switched on."""


def results(operator: Operator, case: Case) -> dict[str, Tensor]:
    """Output, lse and the gradient of every operand."""
    operands = {name: x.detach().clone().requires_grad_() for name, x in case.operands.items()}
    out, lse = operator(case, operands)
    # A tensor of another dtype is for assert_agrees to find, not for autograd.
    flowing = (case.grad_out.to(out.dtype), case.grad_lse.to(lse.dtype))
    gradients = torch.autograd.grad((out, lse), tuple(operands.values()), flowing)
    named = {f"gradient of {name}": g for name, g in zip(operands, gradients)}
    return {"out": out.detach(), "lse": lse.detach(), **named}


def oracle(precision: torch.dtype = torch.float64, keep: Tensor | None = None) -> Operator:
    """The oracle as an operator; in float32 it is the plain run that errors are measured against."""

    def operator(case: Case, operands: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out, lse, _ = attention(
            **operands, edge_index=case.edge_index, **case.settings, keep=keep, precision=precision
        )
        return out, lse

    return operator


def assert_close_to_oracle(actual: Tensor, exact: Tensor, plain: Tensor, dtype: torch.dtype, name: str = ""):
    """error <= 3 * (error of a plain run in that dtype) + 2 * eps * max|exact|, in the maximum norm.

    `plain` is the float32 run, rounded to `dtype`. Rounding errors are proportional to eps, so for float64
    the error of the float32 run is scaled down; and since float64 is the oracle's own precision, the two
    errors of that size may add up.
    """
    assert actual.dtype == dtype, f"{name}: dtype {actual.dtype}, not {dtype}"
    assert actual.shape == exact.shape, f"{name}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    actual, plain = actual.double(), plain.double()
    infinite = torch.isinf(exact)
    assert torch.equal(actual[infinite], exact[infinite]), f"{name}: must be infinite where the oracle is"
    actual, exact, plain = actual[~infinite], exact[~infinite], plain[~infinite]
    if exact.numel() == 0:
        return
    assert torch.isfinite(exact).all(), f"{name}: the oracle itself is not finite"
    plain_error = (plain - exact).abs().max().item()
    eps = torch.finfo(dtype).eps
    if dtype == torch.float64:
        plain_error *= 2 * eps / torch.finfo(torch.float32).eps
    allowed = 3 * plain_error + 2 * eps * exact.abs().max().item()
    error = (actual - exact).abs().max().item()
    # Written so that NaN fails.
    assert error <= allowed, f"{name}: error {error:.3g}, allowed {allowed:.3g} (plain run {plain_error:.3g})"


def assert_agrees(operator: Operator, case: Case, keep: Tensor | None = None):
    """The operator's values and every gradient are the oracle's, in the right dtype, for this case."""
    exact = results(oracle(keep=keep), case.to(torch.float64))
    plain = results(
        oracle(torch.float32, keep), case.to(torch.float32) if case.dtype == torch.float64 else case
    )
    actual = results(operator, case)
    assert actual.keys() == exact.keys()
    for name, tensor in actual.items():
        dtype = statistics_dtype(case.dtype) if name == "lse" else case.dtype
        assert_close_to_oracle(tensor, exact[name], plain[name], dtype, name)
