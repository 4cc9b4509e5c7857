"""Mixtures: every prefix of the samples has each file's share of it, and any sample is found without the others."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpp import mixture

WEIGHTS = st.lists(st.integers(1, 300), min_size=1, max_size=9)


@settings(max_examples=150, deadline=None)
@given(WEIGHTS)
def test_every_prefix_is_within_one_of_its_share(weights):
    """Exactly: |count * sum - weight * n| < sum, for every file and every n up to two periods and a bit."""
    mix, total = mixture.make(weights), sum(weights)
    files, _ = mix.locate(np.arange(2 * len(mix.file) + 5))
    counts = np.cumsum(files[:, None] == np.arange(len(weights)), axis=0)
    n = np.arange(1, len(files) + 1)
    assert (abs(counts * total - n[:, None] * np.asarray(weights)) < total).all()


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(0, 10**12))
def test_samples_of_a_file_come_in_order_without_gaps(weights, start):
    mix = mixture.make(weights)
    period = len(mix.file)
    samples = np.arange(start // period * period, start // period * period + 2 * period)
    files, found = mix.locate(samples)
    for i, part in enumerate(mix.parts.tolist()):
        mine = found[files == i]
        assert np.array_equal(mine, np.arange(start // period * part, (start // period + 2) * part))
    one = mix.locate(samples[-1:])
    assert (one[0][0], one[1][0]) == (files[-1], found[-1])


@pytest.mark.parametrize(
    ("weights", "parts"),
    [
        ([0.5, 0.3, 0.2], (5, 3, 2)),
        ([1, 1, 1], (1, 1, 1)),
        ([0.7], (1,)),
        ([1e-3, 0.999], (1, 999)),
        ([4, 6.5], (8, 13)),
        ([12, 18], (2, 3)),
    ],
)
def test_parts_are_the_decimals_that_were_given(weights, parts):
    assert mixture.whole_parts(weights) == parts


def test_parts_are_rounded_where_a_period_would_be_long(monkeypatch):
    monkeypatch.setattr(mixture, "MOST_PARTS", 1000)
    parts = np.asarray(mixture.whole_parts([1_000_003, 3_000_001, 7]))
    assert parts[2] == 1 and 990 < parts.sum() < 1010
    assert np.allclose(parts[:2] / parts.sum(), [0.25, 0.75], atol=1e-3)
    assert mixture.whole_parts([333, 667]) == (333, 667)
