"""Bars of progress, in terminals and notebooks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ._errors import OptionError

Progress = Callable[[int, int], object] | bool | None


@contextmanager
def watched(progress: Progress, title: str, unit: str) -> Iterator[Callable[[int, int], object] | None]:
    """Give the function that work calls with what is done and what there is in total.

    Args:
        progress: A function is given as it is. True shows a bar of tqdm, also in notebooks. None and False show nothing.
        title: Name of the work, beside the bar.
        unit: What is counted: "B" for bytes, or a word.

    Raises:
        OptionError: True needs tqdm, which is not installed.
    """
    if progress is None or progress is False:
        yield None
        return
    if progress is not True:
        yield progress
        return
    try:
        from tqdm.auto import tqdm
    except ImportError:
        raise OptionError("progress=True needs tqdm, which is not installed: pip install tqdm") from None
    in_bytes = unit == "B"
    with tqdm(desc=title, unit=unit, unit_scale=in_bytes, unit_divisor=1024 if in_bytes else 1000) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update
