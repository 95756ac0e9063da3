"""A pytest plugin (``-p tests.triton_interpreter``) under which CPU tensors are computed by the Triton kernels.

Triton's interpreter runs them on the CPU, one program after the other, in NumPy. It has to be chosen before Triton is
imported, so tests under it have a process of their own.
"""

import os
import warnings

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from triton import language as tl
from triton.runtime import interpreter

from graphattn import attention
from graphattn.kernels import intervals_triton, sparse_cpu, sparse_triton, windows_triton

_patch_tensor = interpreter._patch_lang_tensor


def _patch_index(tensor, *scope) -> None:
    """NumPy 2.4 and later do not turn an array of one number into an index."""
    _patch_tensor(tensor, *scope)  # without a scope before Triton 3.6
    put = scope[0].set_attr if scope else setattr
    put(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_index
_multiply = interpreter.InterpreterBuilder.create_dot


def _dot(self, a, b, *rest):
    """The interpreter multiplies the bits of bfloat16 as integers."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = (
            interpreter.TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
            for x in (a, b)
        )
    return _multiply(self, a, b, *rest)


interpreter.InterpreterBuilder.create_dot = _dot


def _forward(rows, query, key, value, *options):
    return windows_triton.forward(query, key, value, *rows, *rows, *options)  # reads the rows alone


def _backward(rows, columns, *arguments):
    return windows_triton.backward(*arguments[:11], *rows, *columns, *arguments[11:-1])


# Of the operator on structured graphs, from here on.
_library = torch.library.Library("graphattn", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there was another body
    _library.impl("interval_attention", intervals_triton.forward, "CPU", allow_override=True)
    _library.impl(
        "interval_attention_backward",
        lambda *arguments: intervals_triton.backward(*arguments[:-1]),
        "CPU",
        allow_override=True,
    )


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The operator's CPU body is the Triton one."""
    monkeypatch.setattr(sparse_cpu, "listed", lambda *indices: indices)
    monkeypatch.setattr(sparse_cpu, "forward", _forward)
    monkeypatch.setattr(sparse_cpu, "backward", _backward)
    monkeypatch.setattr(attention, "_in_blocks", lambda *_: False)
    # Wide programs, as the interpreter takes about as long for each, whatever its width.
    monkeypatch.setattr(sparse_triton, "_WARPS", 16)
    with np.errstate(all="ignore"):  # a GPU does not warn of infinities
        yield
