"""The oracle is right, and the tester rejects what is wrong."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from tests import oracle

# Two parallel edges, a self-loop, a query (3) without edges and a key (4) that no edge uses.
EDGES = [(1, 0), (1, 0), (2, 0), (2, 2), (0, 2), (3, 2), (0, 1)]
GRAPH = (torch.tensor(EDGES).t(), 5, 4)

OPTIONS = {
    "plain": {},
    "bias": {"bias": ("E", "H")},
    "bias per head": {"bias": ("1", "H")},
    "bias per edge": {"bias": ("E", "1")},
    "edges removed": {"bias": ("E", "H"), "removed": 0.4},
    "edge features": {"edge_dim": 3},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 0.7},
    "grouped heads": {"heads": 4, "kv_heads": 2},
    "another value dim": {"value_dim": 5},
    "one leading dim": {"leading": (2,)},
    "two leading dims": {"leading": (2, 3)},
    "all": {
        "heads": 4,
        "kv_heads": 2,
        "leading": (2,),
        "edge_dim": 2,
        "scale": 0.9,
        "softcap": 2.0,
        "bias": ("E", "H"),
        "removed": 0.2,
    },
}


def draw_keep(case: oracle.Case) -> torch.Tensor:
    *leading, _, heads, _ = case.operands["query"].shape
    return torch.randint(0, 2, (*leading, case.edge_index.shape[1], heads)).double() / 0.5


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_vectorised_oracle_equals_the_loops(options, dropout):
    case = oracle.draw_case(GRAPH, dim=3, **{"value_dim": 3, **options})
    keep = draw_keep(case) if dropout else None
    out, lse, weights = oracle.attention(
        **case.operands, edge_index=case.edge_index, **case.settings, keep=keep
    )
    expected = oracle.attention_by_loops(
        **{name: x.numpy() for name, x in case.operands.items()},
        edges=EDGES,
        **case.settings,
        keep=None if keep is None else keep.numpy(),
    )
    for actual, wanted in zip((out, lse, weights), expected):
        np.testing.assert_allclose(actual.numpy(), wanted, rtol=1e-13, atol=1e-13)


def test_oracle_equals_dense_softmax():
    mask = torch.rand(6, 7) < 0.5
    mask[:, 0] = True
    query, key, value = (torch.randn(n, 1, 4, dtype=torch.float64) for n in (6, 7, 7))
    score = (query[:, 0] @ key[:, 0].t() / 2).masked_fill(~mask, -math.inf)
    target, source = mask.nonzero().t()
    out, lse, weights = oracle.attention(query, key, value, torch.stack((source, target)))
    torch.testing.assert_close(out[:, 0], score.softmax(1) @ value[:, 0], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(lse[:, 0], score.logsumexp(1), rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(weights[:, 0], score.softmax(1)[mask], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("name", ["plain", "edges removed", "edge features", "softcap", "grouped heads"])
def test_oracle_derivatives(name):
    case = oracle.draw_case(GRAPH, dim=2, **OPTIONS[name])
    keep = draw_keep(case)
    names = list(case.operands)
    finite = case.operands.get("bias", torch.zeros(())) > -math.inf

    def operator(*tensors):
        operands = dict(zip(names, tensors))
        if "bias" in operands:
            operands["bias"] = operands["bias"].masked_fill(~finite, -math.inf)
        out, lse, weights = oracle.attention(
            **operands, edge_index=case.edge_index, **case.settings, keep=keep
        )
        return out, lse.masked_fill(lse == -math.inf, 0.0), weights

    inputs = [x.masked_fill(x == -math.inf, 0.0).requires_grad_() for x in case.operands.values()]
    assert gradcheck(operator, inputs)
    assert gradgradcheck(operator, inputs)


# The tester.

CASE = oracle.draw_case(GRAPH, bias=("E", "H"), edge_dim=3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tester_accepts_the_plain_run(options, dtype):
    oracle.assert_agrees(oracle.oracle(torch.float32), oracle.draw_case(GRAPH, dtype=dtype, **options))


def wrong_edge(case, operands):
    edge_index = case.edge_index.clone()
    edge_index[0, 0] = 4
    return oracle.oracle()(replace(case, edge_index=edge_index), operands)


def missing_scale(case, operands):
    return oracle.oracle()(replace(case, settings={"scale": 1.0}), operands)


def not_a_number(case, operands):
    out, lse = oracle.oracle()(case, operands)
    return torch.where(torch.arange(out.numel()).view_as(out) == 5, math.nan, out), lse


def wrong_dtype(case, operands):
    out, lse = oracle.oracle()(case, operands)
    return out.float(), lse


def wrong_lse_dtype(case, operands):
    out, lse = oracle.oracle()(case, operands)
    return out, lse.float()


def finite_lse(case, operands):
    out, lse = oracle.oracle()(case, operands)
    return out, lse.masked_fill(lse == -math.inf, -1e30)


class SwappedGradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, key, value):
        return key.clone(), value.clone()

    @staticmethod
    def backward(ctx, grad_key, grad_value):
        return grad_value, grad_key


def swapped_key_and_value(case, operands):
    key, value = SwappedGradients.apply(operands["key"], operands["value"])
    return oracle.oracle()(case, {**operands, "key": key, "value": value})


def lost_lse_gradient(case, operands):
    out, lse = oracle.oracle()(case, operands)
    return out, lse.detach() + 0.0 * out.sum()


def edge_term_in_key_only(case, operands):
    target = case.edge_index[1]
    feature = torch.einsum("ef,hfd->ehd", operands["edge_attr"], operands["edge_projection"])
    score = (operands["query"][target] * feature).sum(-1) * 8**-0.5
    plain = {name: operands[name] for name in ("query", "key", "value")}
    return oracle.oracle()(case, {**plain, "bias": operands["bias"] + score})


@pytest.mark.parametrize(
    "wrong",
    [
        wrong_edge,
        missing_scale,
        not_a_number,
        wrong_dtype,
        wrong_lse_dtype,
        finite_lse,
        swapped_key_and_value,
        lost_lse_gradient,
        edge_term_in_key_only,
    ],
    ids=lambda wrong: wrong.__name__,
)
def test_tester_rejects(wrong):
    oracle.assert_agrees(oracle.oracle(), CASE)
    with pytest.raises(AssertionError):
        oracle.assert_agrees(wrong, CASE)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_tester_rejects_an_error_of_a_few_eps(dtype):
    """Three times what rounding explains is refused; the tolerance has no room to hide a wrong term in."""
    exact = torch.linspace(-1, 1, 99, dtype=torch.float64)
    plain = exact.to(torch.float32 if dtype == torch.float64 else dtype)
    oracle.assert_close_to_oracle(exact.to(dtype), exact, plain, dtype)
    with pytest.raises(AssertionError):
        oracle.assert_close_to_oracle(
            (exact * (1 + 6 * torch.finfo(dtype).eps)).to(dtype), exact, plain, dtype
        )
