"""Attention on listed edges on the CPU."""

import torch

from graphattn.kernels import reference


def forward(*inputs):
    out, lse, aggregate, weights = reference.sparse_attention(*inputs[:6], *inputs[9:16])
    return out, lse, aggregate, weights if inputs[16] else weights.new_empty(0)


def backward(*arguments):
    from concurrent.futures import ThreadPoolExecutor

    with ThreadPoolExecutor(1) as pool:
        return pool.submit(_backward, *arguments).result()


def _backward(*arguments):
    grads, inputs = arguments[:4], list(arguments[8:])
    with torch.enable_grad():
        where = [i for i in (0, 1, 2, 9, 10, 11) if inputs[i] is not None]
        for i in where:
            inputs[i] = inputs[i].detach().requires_grad_()
        outputs = reference.sparse_attention(*inputs[:6], *inputs[9:16])
        n = 4 if inputs[16] else 3
        pairs = [(o, g) for o, g in zip(outputs[:n], grads[:n]) if o.requires_grad]
        found = dict(
            zip(
                where,
                torch.autograd.grad(
                    [o for o, _ in pairs],
                    [inputs[i] for i in where],
                    [g for _, g in pairs],
                    materialize_grads=True,
                ),
            )
        )
    return tuple(found[i] if i in found else inputs[0].new_empty(0) for i in (0, 1, 2, 9, 10, 11))
