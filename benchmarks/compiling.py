"""Kernels compiled ahead of a sweep, by many processes into the compiler's cache on disk."""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, wait
from multiprocessing import get_context
from typing import Any


def faults_of(attempt: Callable[..., None], cases: Sequence[tuple[Any, ...]], patience_s: float) -> list[str | None]:
    """
    Why each case fails, None where it does not; processes, because Python's part is half of the work.

    Args:
        attempt: Compiles and runs a case; of a module's top, so that another process finds it.
        cases: Its arguments.
        patience_s: What has not ended by then fails.
    """
    pool = ProcessPoolExecutor(min(16, os.cpu_count() or 1), mp_context=get_context("spawn"))
    futures = [pool.submit(_fault, attempt, case) for case in cases]
    wait(futures, timeout=patience_s)
    faults: list[str | None] = []
    for future in futures:
        if not future.done():
            faults.append("out of time")
        else:
            faults.append(future.result() if future.exception() is None else "the process died")
    pool.shutdown(wait=False, cancel_futures=True)
    return faults


def _fault(attempt: Callable[..., None], case: tuple[Any, ...]) -> str | None:
    try:
        attempt(*case)
    except Exception as error:  # a compiler fails in many ways, and each costs its candidate alone
        return f"{type(error).__name__}: {error}"[:200]
    return None
