"""Which of several files a sample is from: fixed by weights alone, at any place without walking there.

Weights become whole parts; the files' order over one period, as many samples as there are parts, is a table.

Legend: F files, P parts of a period.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

MOST_PARTS = 1 << 20  # of a period; the table is built by a loop, in about two seconds for so many


class Mixture(NamedTuple):
    """parts: int64 [F], the samples of each file in a period. file: int64 [P], whose each sample is. rank: int64 [P],
    which of its file's samples in the period it is."""

    parts: np.ndarray
    file: np.ndarray
    rank: np.ndarray

    def locate(self, samples: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The file of each sample of a run, and which of that file's samples it is, both counted from 0."""
        periods, places = np.divmod(samples, len(self.file))
        files = self.file[places]
        return files, periods * self.parts[files] + self.rank[places]


def make(weights: Sequence[float]) -> Mixture:
    """The mixture of F files by their weights, above 0: after any n samples, file f has had less than 1 more or fewer
    than its weight's share of n."""
    parts = whole_parts(weights)
    file = _order(parts)
    rank = np.empty_like(file)
    for i, count in enumerate(parts):
        rank[file == i] = np.arange(count)
    return Mixture(np.asarray(parts), file, rank)


def whole_parts(weights: Sequence[float]) -> tuple[int, ...]:
    """The smallest whole numbers that stand to each other as the weights, as written in decimals.

    Where they come to more than `MOST_PARTS`, they are rounded to about so many, and to no less than 1.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(each.denominator for each in exact))
    parts = [int(each * common) for each in exact]
    total = sum(parts)
    if total // math.gcd(*parts) > MOST_PARTS:
        parts = [max(1, round(Fraction(n * MOST_PARTS, total))) for n in parts]
    return tuple(n // math.gcd(*parts) for n in parts)


@lru_cache(maxsize=4)
def _order(parts: tuple[int, ...]) -> np.ndarray:
    """The file of each sample of a period, int64 [P].

    The j-th sample of a file is in time if it comes after (j-1) P / part samples and not after j P / part; of those
    that may come, the one due first does. On one processor that keeps every deadline (Baruah et al. 1996, proportionate
    progress).
    """
    period = sum(parts)
    done, ready = [0] * len(parts), []
    coming = [(1, i) for i in range(len(parts))]  # (first place, counted from 1, file)
    found = np.empty(period, np.int64)
    for place in range(1, period + 1):
        while coming and coming[0][0] <= place:
            _, i = heapq.heappop(coming)
            heapq.heappush(ready, (-(-(done[i] + 1) * period // parts[i]), i))  # (last place, rounded up, file)
        _, i = heapq.heappop(ready)
        found[place - 1] = i
        done[i] += 1
        heapq.heappush(coming, (done[i] * period // parts[i] + 1, i))
    return found
