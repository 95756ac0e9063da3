"""Work on several threads at once: those that PyTorch's own operators run on.

Their OpenMP runtime keeps its threads awake for milliseconds after an operator, in wait for the next. Threads of ours
would have to share the cores with them; called through that runtime, work starts on them in microseconds.
"""

import ctypes
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

import torch

c_function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)  # made from an address or a Python function

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _openmp() -> Any:
    """The OpenMP runtime that PyTorch is linked with, if there is one that takes calls as GNU's does."""
    try:
        library = ctypes.CDLL(torch._C.__file__)
        library.GOMP_parallel.argtypes = [c_function, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
        library.GOMP_parallel.restype = library.omp_set_num_threads.restype = None
    except (AttributeError, OSError):
        return None
    return library


_runtime = _openmp()
_set_mkl_threads = getattr(_runtime, "MKL_Set_Num_Threads_Local", lambda number: number)


def _forget() -> None:
    global _runtime, _pool, _lock
    _runtime, _pool, _lock = None, None, threading.Lock()


if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads; OpenMP would wait for them for ever.
    os.register_at_fork(after_in_child=_forget)


def in_parallel(function: Any, argument: int | None, threads: int) -> None:
    """Call a `c_function` on each of so many threads, or of fewer if there are no more."""
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


def serially_in_parallel(function: Callable[[], None], threads: int) -> None:
    """The same for a Python function whose PyTorch operators each compute on one thread, as if there were no other."""
    failed = []

    def call(_: int | None) -> None:
        torch.get_num_threads()  # PyTorch sets the number when a thread first asks for it, then we may
        if _runtime is not None:
            _runtime.omp_set_num_threads(1)  # for this thread, until the call ends
        usual = _set_mkl_threads(1)
        try:
            function()
        except BaseException as error:  # which C would lose
            failed.append(error)
        finally:
            _set_mkl_threads(usual)

    in_parallel(c_function(call), None, threads)
    if failed:
        raise failed[0]


def _workers(number: int) -> ThreadPoolExecutor:
    """At least so many threads, on each of which PyTorch computes serially."""
    global _pool
    with _lock:
        if _pool is None or _pool._max_workers < number:
            everyone = threading.Barrier(number)

            def serial() -> None:
                torch.get_num_threads()  # PyTorch sets the number when a thread first asks for it, then we may
                torch.set_num_threads(1)
                everyone.wait()

            pool = ThreadPoolExecutor(number, thread_name_prefix="graphattn")
            usual = torch.get_num_threads()
            for started in [pool.submit(serial) for _ in range(number)]:
                started.result()
            torch.set_num_threads(usual)  # new threads start with what was set last, anywhere
            _pool = pool
        return _pool
