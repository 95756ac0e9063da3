"""Kernels as C functions, and calls of them on several threads at once: those that PyTorch's own operators run on.

Their OpenMP runtime keeps its threads awake for milliseconds after an operator, in wait for the next. Threads of ours
would have to share the cores with them; called through that runtime, work starts on them in microseconds.
"""

import ctypes
import functools
import os
import threading
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import numpy as np
import torch
from numba import from_dtype, types
from torch import Tensor

C_FUNCTION: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _openmp() -> Any:
    """The OpenMP runtime that PyTorch is linked with, if there is one that takes calls as GNU's does."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        library.GOMP_parallel.argtypes = [C_FUNCTION, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = None
    except (AttributeError, OSError):
        return None
    return library


_runtime = _openmp()


def _forget() -> None:
    global _runtime, _pool, _lock
    _runtime, _pool, _lock = None, None, threading.Lock()


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads; OpenMP would wait for them for ever.
    os.register_at_fork(after_in_child=_forget)


@functools.cache
def c_function_of(kernel: Any, record: np.dtype) -> Any:
    """A function of `graphattn.compiled` as a `C_FUNCTION` of the address of a record, compiled for this type of it."""
    compiled = kernel.get_compile_result(types.none(types.CPointer(from_dtype(record))))
    return C_FUNCTION(compiled.library.get_pointer_to_function(compiled.fndesc.llvm_cfunc_wrapper_name))


def address(x: Tensor) -> int:
    """Where the first number of a tensor lies, for a kernel to read.

    Raises:
        RuntimeError: its memory was freed, as sharding does between uses.
    """
    place = x.data_ptr()
    if place == 0 and x.numel() > 0:
        raise RuntimeError(
            f"A tensor of shape {list(x.shape)} has no memory: its storage was freed or resized to 0."
        )
    return place


def in_parallel(function: Any, argument: int | None, threads: int) -> None:
    """Call a `C_FUNCTION` on each of so many threads, or of fewer if there are no more."""
    if _runtime is not None:
        _runtime.GOMP_parallel(function, argument, threads, 0)
        return
    pool = _workers(threads)
    calls = [pool.submit(function, argument) for _ in range(threads)]
    try:
        for call in calls:
            call.result()
    finally:
        wait(calls)  # also when interrupted: they write to what the caller would give back


def _workers(number: int) -> ThreadPoolExecutor:
    """At least so many threads."""
    global _pool
    with _lock:
        if _pool is None or _pool._max_workers < number:
            _pool = ThreadPoolExecutor(number, thread_name_prefix="graphattn")
        return _pool
