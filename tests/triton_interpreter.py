"""A pytest plugin (``-p tests.triton_interpreter``) under which CPU tensors are computed by the Triton kernels.

Triton's interpreter runs them on the CPU, one program after the other, in NumPy. It has to be chosen before Triton is
imported, so tests under it have a process of their own.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
from triton.runtime import interpreter

from graphattn.kernels import sparse_cpu, sparse_triton

_patch_tensor = interpreter._patch_lang_tensor


def _patch_index(tensor, scope) -> None:
    """NumPy 2.4 and later do not turn an array of one number into an index."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


interpreter._patch_lang_tensor = _patch_index


def _forward(rows, query, key, value, *options):
    return sparse_triton.forward(query, key, value, *rows, *rows, *options)  # reads the rows alone


def _backward(rows, columns, *arguments):
    return sparse_triton.backward(*arguments[:11], *rows, *columns, *arguments[11:])


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The operator's CPU body is the Triton one."""
    monkeypatch.setattr(sparse_cpu, "listed", lambda *indices: indices)
    monkeypatch.setattr(sparse_cpu, "forward", _forward)
    monkeypatch.setattr(sparse_cpu, "backward", _backward)
    # Wide programs, as the interpreter takes about as long for each, whatever its width.
    monkeypatch.setattr(sparse_triton, "_WARPS", 16)
    with np.errstate(all="ignore"):  # a GPU does not warn of infinities
        yield
