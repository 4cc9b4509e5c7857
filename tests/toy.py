"""Small models, batches and helpers that the tests share.

Legend: B microbatch size, T sequence, D model, V vocabulary; S stages, M microbatches, L layers.
"""

import random
from collections.abc import Iterator
from functools import partial
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import jaxpp
from jaxpp.executor import Pipeline, Result, train_step

WIDE, NARROW = 512, 51  # vocabularies: WIDE x 64 rests sharded over the pipe, NARROW x 64 whole on every rank
DIM, B, T = 64, 2, 8
KEEP = 0.9
# XLA leaves out roundings to bfloat16 within one program; with all of them made, pipelined and unpipelined are equal.
EXACT = {"xla_allow_excess_precision": False}


def _normal(rng: np.random.Generator, scale: float, *shape: int) -> nnx.Param:
    return nnx.Param(jnp.asarray(rng.normal(size=shape) * scale, jnp.float32))


def _dropout(x: jax.Array, key: jax.Array | None) -> jax.Array:
    return x if key is None else jnp.where(jax.random.bernoulli(key, KEEP, x.shape), x / KEEP, 0).astype(x.dtype)


class Embed(nnx.Module):
    """A lookup, with dropout where a key is given."""

    def __init__(self, rng: np.random.Generator, vocab: int) -> None:
        self.table = _normal(rng, 0.5, vocab, DIM)

    def __call__(self, microbatch: dict, key: jax.Array | None) -> jax.Array:
        return _dropout(self.table[...][microbatch["tokens"]], key)


class Block(nnx.Module):
    """x + gelu(norm(x) @ w + 1/2), in whatever dtype the stream has, with dropout where a key is given.

    With weights of zero it is not the identity, so that an empty place that runs would show.
    """

    EPSILON = 1e-6

    def __init__(self, rng: np.random.Generator) -> None:
        self.w = _normal(rng, 0.15, DIM, DIM)
        self.gain = nnx.Param(jnp.asarray(rng.uniform(0.5, 1.5, DIM), jnp.float32))

    def __call__(self, x: jax.Array, microbatch: dict, key: jax.Array | None) -> jax.Array:
        n = x.astype(jnp.float32)
        n = n / jnp.sqrt(jnp.mean(n * n, axis=-1, keepdims=True) + self.EPSILON) * self.gain[...]
        w = self.w[...]
        return x + _dropout(jax.nn.gelu(n.astype(w.dtype) @ w + 0.5), key).astype(x.dtype)


class Sharp(Block):
    """A block whose value and gradient at x = 0 are NaN."""

    EPSILON = 0.0


class Identity(nnx.Module):
    """A block without parameters that hands on what it got."""

    def __init__(self, rng: np.random.Generator) -> None:
        pass

    def __call__(self, x: jax.Array, microbatch: dict, key: jax.Array | None) -> jax.Array:
        return x


class Head(nnx.Module):
    """Logits from a matrix of its own, or from the embedding's table."""

    def __init__(self, rng: np.random.Generator, vocab: int, tied: bool) -> None:
        self.tied = tied
        if not tied:
            self.w = _normal(rng, 0.15, DIM, vocab)

    def __call__(self, x: jax.Array, embed: Embed) -> jax.Array:
        return x @ (embed.table[...].T if self.tied else self.w[...]).astype(x.dtype)


class PairEmbed(Embed):
    """The stream is a tree: x, and a float32 number a row."""

    def __call__(self, microbatch: dict, key: jax.Array | None) -> dict:
        x = super().__call__(microbatch, key)
        return {"x": x, "aux": jnp.mean(x.astype(jnp.float32), axis=(1, 2))}


class PairBlock(Block):
    def __call__(self, stream: dict, microbatch: dict, key: jax.Array | None) -> dict:
        x = super().__call__(stream["x"], microbatch, key)
        return {"x": x, "aux": stream["aux"] + jnp.mean(jnp.square(x.astype(jnp.float32)), axis=(1, 2))}


class PairHead(Head):
    def __call__(self, stream: dict, embed: Embed) -> jax.Array:
        gate = 1 + 0.1 * stream["aux"][:, None, None]
        return super().__call__(stream["x"], embed).astype(jnp.float32) * gate


class Probe(nnx.Module):
    """Adds w[which] * coefficient * draw to the stream [B, T], where the draw is 1 without a key: its gradient is the
    sum of what it was multiplied with. As an embedding it starts the stream, as a head it returns it."""

    def __init__(self, size: int = 1) -> None:
        self.w = nnx.Param(jnp.ones(size))

    def add(self, x: Any, microbatch: dict, key: jax.Array | None) -> jax.Array:
        draw = 1.0 if key is None else jax.random.uniform(key)
        factor = (microbatch["coefficient"] * draw).astype(self.w[...].dtype)
        return x + self.w[...][microbatch["which"]] * factor

    def __call__(self, x: Any, second: Any, third: Any = None) -> jax.Array:
        # embed(microbatch, key), block(x, microbatch, key), and head(x, microbatch) by `probe_loss`.
        return self.add(0, x, second) if isinstance(x, dict) else self.add(x, second, third)


def probe_loss(head: Probe, embed: Probe, x: jax.Array, microbatch: dict) -> jax.Array:
    """The sum of the stream, where no label is ignored."""
    return jnp.sum(head(x, microbatch).astype(jnp.float32))


def model(
    layers: int, vocab: int = WIDE, tied: bool = False, block: type = Block, seed: int = 0, pair: bool = False
) -> jaxpp.Model:
    """A model of L blocks of one kind, its weights drawn from a seed; pair, the one whose stream is a tree."""
    rng = np.random.default_rng(seed)
    embed, head = (PairEmbed, PairHead) if pair else (Embed, Head)
    blocks = [(PairBlock if pair else block)(rng) for _ in range(layers)]
    return jaxpp.Model(embed(rng, vocab), blocks, head(rng, vocab, tied))


def probe_model(layers: int, size: int = 1) -> jaxpp.Model:
    """A model whose gradients are sums of the batch's coefficients."""
    return jaxpp.Model(Probe(size), [Probe(size) for _ in range(layers)], Probe(size))


def probe_batch(coefficients: np.ndarray, which: np.ndarray | None = None, valid: int = 1) -> dict[str, jax.Array]:
    """One row of one token a microbatch, `valid` of whose labels count: the loss is divided by it."""
    shape = (*coefficients.shape, 1) if coefficients.ndim == 2 else (*coefficients.shape, 1, 1)
    labels = np.full(shape, -100)
    labels.reshape(-1)[:valid] = 0
    which = np.zeros(shape, int) if which is None else which.reshape(shape)
    arrays = {"tokens": labels * 0, "labels": labels, "which": which}
    return {k: jnp.asarray(v, jnp.int32) for k, v in arrays.items()} | {
        "coefficient": jnp.asarray(coefficients.reshape(shape), jnp.float32)
    }


def batch(microbatches: int, data: int = 1, vocab: int = WIDE, seed: int = 0) -> dict[str, jax.Array]:
    """A random batch [M, DP*B, T]. Labels are distinct as far as the vocabulary goes; the share of ignored ones rises
    from row to row of the global batch, and one data rank's part of the second microbatch has no label at all."""
    rng = np.random.default_rng(seed)
    shape = (microbatches, data * B, T)
    labels = np.resize(rng.permutation(vocab), shape)
    share = np.linspace(0, 0.7, microbatches * data * B).reshape(*shape[:2], 1)
    labels = np.where(rng.random(shape) < share, -100, labels)
    labels[1:2, :B] = -100
    return {
        "tokens": jnp.asarray(rng.integers(0, vocab, shape), jnp.int32),
        "labels": jnp.asarray(labels, jnp.int32),
    }


def set_up(
    net: jaxpp.Model,
    data_batch: dict,
    name: str = "1f1b",
    stages: int = 2,
    chunks: int = 1,
    data: int = 1,
    **options: Any,
) -> tuple[Pipeline, jaxpp.partition.Placed]:
    """A pipeline for a batch and the model's parameters in their places; options as in `Pipeline`, of `make_mesh`, and
    layer_split."""
    others = {axis: options.pop(axis) for axis in ("expert", "context", "tensor") if axis in options}
    mesh = jaxpp.make_mesh(pipe=stages, data=data, **others)
    params = jaxpp.place(net, mesh, chunks, options.pop("layer_split", None), options.get("zero_stage", 0))
    schedule = jaxpp.build(name, stages, len(data_batch["labels"]), chunks)
    return Pipeline(schedule, mesh, options.pop("precision", jaxpp.resolve()), **options), params


def run(net: jaxpp.Model, data_batch: dict, key: jax.Array | None = None, **options: Any) -> Result:
    """One compiled step; its gradients layer by layer, as numpy arrays."""
    pipeline, params = set_up(net, data_batch, **options)
    result = jax.jit(partial(train_step, pipeline), compiler_options=EXACT)(params, data_batch, key)
    return jax.device_get(result._replace(grads=jaxpp.unstack(jax.device_get(result.grads))))


def step_jaxpr(pipeline: Pipeline, params: Any, data_batch: dict, key: jax.Array | None = None) -> Any:
    """The jaxpr of the whole step."""
    return jax.make_jaxpr(partial(train_step, pipeline))(params, data_batch, key)


def equations(jaxpr: Any) -> Iterator[Any]:
    """Every equation of a jaxpr and of those inside it."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        inner = jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda a: hasattr(a, "eqns"))
        for sub in inner:
            if hasattr(sub, "eqns"):
                yield from equations(sub)


def permutes(jaxpr: Any) -> list[tuple[Any, tuple[tuple[int, int], ...]]]:
    """(operand, pairs) of every ppermute."""
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "ppermute"]
    return [(v.aval, tuple(eqn.params["perm"])) for eqn in found for v in eqn.invars]


def pairs_of(case: dict) -> set:
    return set(combinations(case.items(), 2))


def all_pairs(factors: dict, seed: int = 0) -> list[dict]:
    """Cases in which every two values of two factors meet, greedily: the best of some random cases, again and again."""
    rng = random.Random(seed)
    missing = {pair for case in product(*factors.values()) for pair in pairs_of(dict(zip(factors, case, strict=True)))}
    cases = []
    while missing:
        tries = [{name: rng.choice(values) for name, values in factors.items()} for _ in range(300)]
        cases.append(max(tries, key=lambda case: len(pairs_of(case) & missing)))
        missing -= pairs_of(cases[-1])
    return cases


def nans(spec: Any, slots: int | None = None) -> Any:
    """`trees.blank` with NaN in it, so that what reads it shows."""
    lead = () if slots is None else (slots,)
    value = lambda a: np.nan if jnp.issubdtype(a.dtype, jnp.floating) else 0
    return jax.tree.map(lambda a: jnp.full((*lead, *a.shape), value(a), a.dtype), spec)
