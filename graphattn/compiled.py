"""Functions compiled by Numba, once on a machine: later processes load them from a cache on disk."""

import contextlib
import hashlib
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numba
from numba.core.caching import FunctionCache, IndexDataCacheFile


def compiled(function: Callable, error_model: Any = "python", sources: Sequence[str] = ()) -> Callable:
    """Compile a function on its first call, without the interpreter's lock; ``sources`` are files its code is from too.

    Any number of processes may compile at once or be killed meanwhile. Where nothing can be cached, in a read-only
    installation without a home or on a full disk, each process compiles for itself.
    """
    dispatcher: Any = numba.njit(error_model=error_model, nogil=True)(function)
    with contextlib.suppress(RuntimeError):  # of no folder to cache in
        dispatcher._cache = _Cache(function, sources)
    return dispatcher


class _Cache(FunctionCache):
    def __init__(self, function: Callable, sources: Sequence[str]) -> None:
        super().__init__(function)
        # Numba looks at the function's own file only, and would serve code of an older version.
        text = b"".join(Path(source).read_bytes() for source in sources)
        stamp = (self._impl.locator.get_source_stamp(), hashlib.sha256(text).hexdigest())
        self._cache_file = _Files(self._cache_path, self._impl.filename_base, stamp)

    def load_overload(self, sig, target_context):
        try:
            return super().load_overload(sig, target_context)
        except Exception:  # whatever a damaged file leads to: it is compiled anew, and written over
            return None

    def save_overload(self, sig, data):
        with contextlib.suppress(OSError):  # of a full disk, or a folder that is gone
            super().save_overload(sig, data)


class _Files(IndexDataCacheFile):
    def _data_name(self, number: int) -> str:
        # Numba counts the variants of a function, one file each: of two processes that compile different ones at once,
        # both take the same number, and one variant would be served as the other.
        return super()._data_name(uuid.uuid4().int)

    def _load_index(self) -> dict:
        try:
            return super()._load_index()
        except Exception:  # damaged, as above
            return {}
