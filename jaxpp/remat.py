"""What a forward keeps for its backward, split so that only what cannot be had again is stored.

`jax.vjp` returns a function that is a pytree; its leaves are the residuals. Those that *are* (by identity) a weight, a
microbatch array or a key can be had again in the backward slot, so only the others are kept. With the weights left
among them, each microbatch in flight would hold its own copy of the model.
"""

from collections.abc import Callable
from difflib import get_close_matches
from typing import Any, NamedTuple

import jax
from jax.ad_checkpoint import checkpoint_name
from jax.core import Tracer

Tree = Any
_KEPT = "kept"  # the name that `keep` gives
# What a fused attention kernel returns is kept like a product: it takes as long. By the name of JAX's primitive.
_KERNELS = ("dot_product_attention_fwd",)


def keep(x: Tree) -> Tree:
    """Mark arrays of a layer as worth keeping under "dots": what is cheap to have again before them then is not run."""
    return jax.tree.map(lambda a: checkpoint_name(a, _KEPT), x)


def _dots(primitive: Any, *args: Any, **parameters: Any) -> bool:
    """Keep products, what attention kernels return, and what `keep` marks."""
    if primitive.name == "name":
        return parameters["name"] == _KEPT
    kernel = primitive.name.startswith(_KERNELS)
    return kernel or jax.checkpoint_policies.dots_saveable(primitive, *args, **parameters)


POLICIES = {"dots": _dots}  # beside those of jax.checkpoint_policies
_FACTORIES = ("save_", "offload_")  # these are not policies but make them from arguments


def policy_names() -> list[str]:
    """All values of the option remat."""
    known = [n for n in dir(jax.checkpoint_policies) if not n.startswith(("_", *_FACTORIES))]
    return ["full", "none", *POLICIES, *known]


def check_remat(remat: str) -> str:
    """Check the option remat; ValueError names the nearest value and all of them."""
    if remat not in policy_names():
        near = get_close_matches(remat, policy_names(), n=1)
        hint = f", did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"remat={remat!r} is unknown{hint} (one of {', '.join(policy_names())})")
    return remat


def checkpointed(layer: Callable, remat: str) -> Callable:
    """A layer under the policy's `jax.checkpoint`; as it is for "none", and for "full", which keeps chunk inputs."""
    if remat in ("none", "full"):
        return layer
    return jax.checkpoint(layer, policy=POLICIES.get(remat) or getattr(jax.checkpoint_policies, remat))


class Template(NamedTuple):
    """The shape of one layer's residuals, found by an abstract trace.

    tree: structure of the vjp function. source: for each of its leaves an int, the index of the known leaf that it is,
    or None where it is kept, or a constant. kept: `jax.ShapeDtypeStruct` of those that are kept.
    """

    tree: Any
    source: list
    kept: list[jax.ShapeDtypeStruct]


def forward(layer: Callable, weights: Tree, stream: Tree, known: Tree) -> tuple[Tree, list[jax.Array], Template]:
    """Run a layer and collect what its backward needs.

    Args: layer(weights, stream, known) -> stream; known, what the backward slot can build again (microbatch, key).
    Returns: the new stream; the residuals to keep; their template.
    """
    out, vjp = jax.vjp(lambda w, x: layer(w, x, known), weights, stream)
    leaves, tree = jax.tree.flatten(vjp)
    at = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves((weights, known)))}
    source, kept = [], {}
    for leaf in leaves:
        if id(leaf) in at:
            source.append(at[id(leaf)])
        elif isinstance(leaf, Tracer):
            source.append(None)
            kept.setdefault(id(leaf), leaf)  # the same array may be needed twice and is kept once
            source[-1] = ("kept", list(kept).index(id(leaf)))
        else:
            source.append(("constant", leaf))
    arrays = list(kept.values())
    return out, arrays, Template(tree, source, [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in arrays])


def template(layer: Callable, weights: Tree, stream: Tree, known: Tree) -> Template:
    """The template of a layer's residuals, by an abstract trace of `forward`."""
    found = []

    def trace(w: Tree, x: Tree, k: Tree) -> Tree:
        out, _, shape = forward(layer, w, x, k)
        found.append(shape)
        return out

    jax.eval_shape(trace, weights, stream, known)
    return found[0]


def backward(shape: Template, weights: Tree, known: Tree, kept: list[jax.Array], cotangents: Tree) -> tuple[Tree, Tree]:
    """Gradients of a layer from what `forward` kept.

    Returns: gradients of the weights, and of the incoming stream.
    """
    had = jax.tree.leaves((weights, known))
    leaves = []
    for source in shape.source:
        if isinstance(source, int):
            leaves.append(had[source])
        else:
            kind, value = source
            leaves.append(kept[value] if kind == "kept" else value)
    return jax.tree.unflatten(shape.tree, leaves)(cotangents)
