"""Our parameters and those of other formats: one table a model, and how a row of it is read and written.

A row says which of their tensors make one of ours. Letters name dims: "(nh)d>dnh" takes their [N*H, D] to our
[D, N, H], and back. Several pieces are stacked along a dim of ours; "{e}" in a name stands for each expert in turn,
stacked along our first dim. A block's rows are used for every layer i, "{i}" in their names.

Legend: D model, N heads, K kv heads, H head dim, F feed-forward, E experts, V vocabulary, L layers.
"""

import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxpp.partition import path_name


class Piece(NamedTuple):
    """One of their tensors, or part `part` of `parts` equal ones of it along its dim in parentheses."""

    name: str
    part: int = 0
    parts: int = 1


class Row(NamedTuple):
    """ours: path of a parameter within embed, block or head. pieces: of theirs. dims: "theirs>ours" of one piece.

    stacked: the dim of ours that the pieces are stacked along, where there are several.
    """

    ours: str
    pieces: tuple[Piece, ...]
    dims: str
    stacked: int = 0

    @property
    def experts(self) -> bool:
        """Whether each expert has tensors of its own."""
        return "{e}" in self.pieces[0].name


class Table(NamedTuple):
    """The rows of a model: of the embedding, of a block, of the head."""

    embed: tuple[Row, ...]
    block: tuple[Row, ...]
    head: tuple[Row, ...]


def row(ours: str, theirs: str | Sequence[str], dims: str = "d>d", stacked: int = 0) -> Row:
    """A row whose pieces are whole tensors."""
    names = (theirs,) if isinstance(theirs, str) else theirs
    return Row(ours, tuple(Piece(name) for name in names), dims, stacked)


def paths(module: Any) -> dict[str, Any]:
    """The parameters of a module (or their shapes) by dotted path, without the `value` that a Variable adds."""
    leaves = jax.tree_util.tree_leaves_with_path(module)
    return {path_name(path): leaf for path, leaf in leaves}


def rows_of(table: Table, parts: dict[str, dict[str, Any]]) -> list[tuple[str, Row]]:
    """(part, row) of the table for the parameters that a model has: `parts` is embed, block, head -> paths.

    A parameter without a row, or with two, is a fault of the table.
    """
    found = [(part, each) for part in Table._fields for each in getattr(table, part) if each.ours in parts[part]]
    assert len(found) == sum(len(leaves) for leaves in parts.values()), (found, parts)
    return found


def _letters(group: str) -> list[str]:
    return re.findall(r"\(\w+\)|\w", group)


def split_dim(each: Row) -> int:
    """The dim of their tensor that is dealt out in parts: the one in parentheses."""
    return next(i for i, group in enumerate(_letters(each.dims.split(">")[0])) if "(" in group)


def _piece_shape(each: Row, ours: tuple[int, ...]) -> tuple[int, ...]:
    """Our shape of one piece: without the dims that pieces and experts are stacked along."""
    dims = list(ours)
    if len(each.pieces) > 1:
        del dims[each.stacked]
    return tuple(dims[1:] if each.experts else dims)


def their_shape(each: Row, ours: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that each of their tensors must have for our parameter's shape."""
    theirs, mine = each.dims.split(">")
    size = dict(zip(mine, _piece_shape(each, ours), strict=True))
    shape = [math.prod(size[letter] for letter in group.strip("()")) for group in _letters(theirs)]
    if each.pieces[0].parts > 1:
        shape[split_dim(each)] *= each.pieces[0].parts
    return tuple(shape)


def names(each: Row, ours: tuple[int, ...], layer: int | None) -> list[str]:
    """Their names of a row's tensors, without repetition."""
    experts = range(ours[0]) if each.experts else (0,)
    found = [piece.name.format(i=layer, e=e) for e in experts for piece in each.pieces]
    return list(dict.fromkeys(found))


def _to_ours(each: Row, piece: Piece, array: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    theirs, mine = each.dims.split(">")
    size = dict(zip(mine, shape, strict=True))
    array = np.split(array, piece.parts, axis=split_dim(each))[piece.part] if piece.parts > 1 else array
    flat = theirs.replace("(", "").replace(")", "")
    return array.reshape([size[letter] for letter in flat]).transpose([flat.index(letter) for letter in mine])


def read(each: Row, ours: tuple[int, ...], layer: int | None, get: Callable[[str], np.ndarray]) -> np.ndarray:
    """Our parameter, float32, from their tensors; get(name) -> array."""
    found = np.empty(ours, np.float32)
    shape = _piece_shape(each, ours)
    for e, own in enumerate(found) if each.experts else ((0, found),):
        for i, piece in enumerate(each.pieces):
            axis = each.stacked - each.experts
            place = own[(slice(None),) * axis + (i,)] if len(each.pieces) > 1 else own
            place[...] = _to_ours(each, piece, get(piece.name.format(i=layer, e=e)), shape)
    return found


def write(each: Row, array: np.ndarray, layer: int | None) -> Iterator[tuple[str, Piece, np.ndarray]]:
    """Their tensors of our parameter, one piece at a time: (name, piece, array)."""
    theirs, mine = each.dims.split(">")
    flat = theirs.replace("(", "").replace(")", "")
    for e, own in enumerate(array) if each.experts else ((0, array),):
        axis = each.stacked - each.experts
        parts = [own] if len(each.pieces) == 1 else [np.take(own, i, axis=axis) for i in range(len(each.pieces))]
        for piece, part in zip(each.pieces, parts, strict=True):
            size = dict(zip(mine, part.shape, strict=True))
            shape = [math.prod(size[letter] for letter in group.strip("()")) for group in _letters(theirs)]
            moved = part.transpose([mine.index(letter) for letter in flat]).reshape(shape)
            yield piece.name.format(i=layer, e=e), piece, moved


_ATTENTION = (
    row("attention.wq", "model.layers.{i}.self_attn.q_proj.weight", "(nh)d>dnh"),
    row(
        "attention.wkv",
        ["model.layers.{i}.self_attn.k_proj.weight", "model.layers.{i}.self_attn.v_proj.weight"],
        "(kh)d>dkh",
        1,
    ),
    row("attention.wo", "model.layers.{i}.self_attn.o_proj.weight", "d(nh)>nhd"),
    row("attention.bq", "model.layers.{i}.self_attn.q_proj.bias", "(nh)>nh"),
    row(
        "attention.bkv",
        ["model.layers.{i}.self_attn.k_proj.bias", "model.layers.{i}.self_attn.v_proj.bias"],
        "(kh)>kh",
        0,
    ),
    row("attention.bo", "model.layers.{i}.self_attn.o_proj.bias"),
    row("attention.q_norm.scale", "model.layers.{i}.self_attn.q_norm.weight"),
    row("attention.k_norm.scale", "model.layers.{i}.self_attn.k_norm.weight"),
    row("norm1.scale", "model.layers.{i}.input_layernorm.weight"),
    row("norm2.scale", "model.layers.{i}.post_attention_layernorm.weight"),
)
_MLP = (
    row("mlp.wi", ["model.layers.{i}.mlp.gate_proj.weight", "model.layers.{i}.mlp.up_proj.weight"], "fd>df", 1),
    row("mlp.wo", "model.layers.{i}.mlp.down_proj.weight", "df>fd"),
    row("mlp.bi", ["model.layers.{i}.mlp.gate_proj.bias", "model.layers.{i}.mlp.up_proj.bias"], "f>f", 0),
    row("mlp.bo", "model.layers.{i}.mlp.down_proj.bias"),
)
_EXPERT = "model.layers.{i}.block_sparse_moe.experts.{e}."
_MOE = (
    row("mlp.router", "model.layers.{i}.block_sparse_moe.gate.weight", "ed>de"),
    row("mlp.wi", [_EXPERT + "w1.weight", _EXPERT + "w3.weight"], "fd>df", 2),
    row("mlp.wo", _EXPERT + "w2.weight", "df>fd"),
)
_OUTER = {
    "embed": (row("tokens", "model.embed_tokens.weight", "vd>vd"),),
    "head": (row("norm.scale", "model.norm.weight"), row("table", "lm_head.weight", "vd>vd")),
}
DENSE = Table(block=_ATTENTION + _MLP, **_OUTER)
MIXTRAL = Table(block=_ATTENTION + _MOE, **_OUTER)

# GPT-2's projections are stored [in, out], queries, keys and values in one.
_QKV = "transformer.h.{i}.attn.c_attn."
GPT2 = Table(
    embed=(
        row("tokens", "transformer.wte.weight", "vd>vd"),
        row("positions", "transformer.wpe.weight", "td>td"),
    ),
    block=(
        row("norm1.scale", "transformer.h.{i}.ln_1.weight"),
        row("norm1.bias", "transformer.h.{i}.ln_1.bias"),
        row("norm2.scale", "transformer.h.{i}.ln_2.weight"),
        row("norm2.bias", "transformer.h.{i}.ln_2.bias"),
        Row("attention.wq", (Piece(_QKV + "weight", 0, 3),), "d(nh)>dnh"),
        Row("attention.wkv", (Piece(_QKV + "weight", 1, 3), Piece(_QKV + "weight", 2, 3)), "d(kh)>dkh", 1),
        row("attention.wo", "transformer.h.{i}.attn.c_proj.weight", "(nh)d>nhd"),
        Row("attention.bq", (Piece(_QKV + "bias", 0, 3),), "(nh)>nh"),
        Row("attention.bkv", (Piece(_QKV + "bias", 1, 3), Piece(_QKV + "bias", 2, 3)), "(kh)>kh", 0),
        row("attention.bo", "transformer.h.{i}.attn.c_proj.bias"),
        row("mlp.wi", "transformer.h.{i}.mlp.c_fc.weight", "df>df"),
        row("mlp.bi", "transformer.h.{i}.mlp.c_fc.bias"),
        row("mlp.wo", "transformer.h.{i}.mlp.c_proj.weight", "fd>fd"),
        row("mlp.bo", "transformer.h.{i}.mlp.c_proj.bias"),
    ),
    head=(
        row("norm.scale", "transformer.ln_f.weight"),
        row("norm.bias", "transformer.ln_f.bias"),
        row("table", "lm_head.weight", "vd>vd"),
    ),
)

# llm.c's GPT-2 (train_gpt2.c): every parameter stacked over layers, projections stored [out, in] as in PyTorch.
LLMC = Table(
    embed=(row("tokens", "wte", "vd>vd"), row("positions", "wpe", "td>td")),
    block=(
        row("norm1.scale", "ln1w.{i}"),
        row("norm1.bias", "ln1b.{i}"),
        Row("attention.wq", (Piece("qkvw.{i}", 0, 3),), "(nh)d>dnh"),
        Row("attention.wkv", (Piece("qkvw.{i}", 1, 3), Piece("qkvw.{i}", 2, 3)), "(kh)d>dkh", 1),
        Row("attention.bq", (Piece("qkvb.{i}", 0, 3),), "(nh)>nh"),
        Row("attention.bkv", (Piece("qkvb.{i}", 1, 3), Piece("qkvb.{i}", 2, 3)), "(kh)>kh", 0),
        row("attention.wo", "attprojw.{i}", "d(nh)>nhd"),
        row("attention.bo", "attprojb.{i}"),
        row("norm2.scale", "ln2w.{i}"),
        row("norm2.bias", "ln2b.{i}"),
        row("mlp.wi", "fcw.{i}", "fd>df"),
        row("mlp.bi", "fcb.{i}"),
        row("mlp.wo", "fcprojw.{i}", "df>fd"),
        row("mlp.bo", "fcprojb.{i}"),
    ),
    head=(row("norm.scale", "lnfw"), row("norm.bias", "lnfb")),
)
