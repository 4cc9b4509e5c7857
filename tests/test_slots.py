"""What a slot refuses before it is traced into a step; what it computes is held by test_executor.py."""

from typing import Any

import numpy as np
import pytest
import toy

import jaxpp


class PlacedEmbed(toy.Embed):
    def __call__(self, microbatch: dict, key: Any) -> dict:
        return {"x": super().__call__(microbatch, key), "at": microbatch["tokens"]}


def test_integers_in_the_stream_are_refused() -> None:
    rng, batch = np.random.default_rng(0), toy.batch(3)
    net = jaxpp.Model(PlacedEmbed(rng, toy.WIDE), [toy.Block(rng), toy.Block(rng)], toy.Head(rng, toy.WIDE, False))
    with pytest.raises(ValueError, match=r"^the stream holds int32\[.*leave integers in the microbatch"):
        toy.run(net, batch)
