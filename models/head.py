"""The head that all models share: a final norm, and a product with the table of the vocabulary.

Legend: B microbatch size, T sequence, D model, V vocabulary.
"""

from typing import Any

import jax
from flax import nnx

from jaxpp.losses import logits, mask_padding
from jaxpp.probe import tap
from jaxpp.sharding import constrain
from models.dense import normal


class Head(nnx.Module):
    """Final norm and projection to the vocabulary, by the embedding's table where tied.

    config: sizes, of any model; norm: the kind of norm, a function (dim, epsilon) -> module.
    """

    def __init__(self, key: jax.Array, config: Any, norm: Any) -> None:
        self.norm = norm(config.dim, config.epsilon)
        if not config.tied:
            self.table = nnx.Param(normal(key, (config.vocab_size, config.dim), config.std), axes=("vocab", None))
        self.tied, self.vocab = config.tied, config.vocab_size

    def factors(self, stream: Any, embed: Any) -> tuple[jax.Array, jax.Array]:
        """Of the logits: the normalised stream [B, T, D], and the table [V, D], whose rows from `vocab` on only pad."""
        table_VD = embed.tokens[...] if self.tied else self.table[...]
        return constrain(self.norm(stream), None, None, None), table_VD

    def __call__(self, stream: Any, embed: Any) -> jax.Array:
        return tap("logits", mask_padding(logits(*self.factors(stream, embed)), self.vocab))
