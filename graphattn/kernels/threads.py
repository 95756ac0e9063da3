"""The threads that kernels on the CPU share: of our own, because those of OpenMP and Numba do not survive a fork or
several callers at once.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

_pool: ThreadPoolExecutor | None = None
_lock = threading.Lock()


def _forget() -> None:
    global _pool, _lock
    _pool, _lock = None, threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)  # a forked child has none of its parent's threads


def workers(number: int) -> ThreadPoolExecutor:
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
