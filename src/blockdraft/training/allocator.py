"""Large temporaries without page faults.

glibc gives every block above a threshold back to the system when it is freed,
and the next one of the same size is faulted in page by page; with tensors of
the vocabulary's size that costs more than the arithmetic. Kept in the heap,
the pages stay.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_freed_memory() -> bool:
    """Tell glibc to keep what is freed; False where there is no glibc."""
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return False
    settings = ((M_MMAP_MAX, 0), (M_TRIM_THRESHOLD, 2**31 - 1), (M_TOP_PAD, 2**26))
    return all(mallopt(name, value) == 1 for name, value in settings)
