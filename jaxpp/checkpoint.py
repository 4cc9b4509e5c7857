"""Checkpoints that know no layout: every parameter of every layer is an array of its own.

A checkpoint is a folder DIR/step-00000100 with

    state/          the arrays, written by orbax: 0/ (parameters), 1/ ... (optimizer), by part, path and layer
    run.json        step, and the options and the model it was trained with
    checksums.json  of all other files; written last, so that a folder without it is not whole

It is written under a name that begins with a dot and renamed when whole, by a thread, from a copy on the host. A
damaged one is passed over with a warning, and the one before is used.
"""

import json
import os
import shutil
import threading
import warnings
import zlib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from jaxpp import partition
from jaxpp.partition import Placed, path_name

Tree = Any
_RUN, _SUMS, _STATE, _PREFIX = "run.json", "checksums.json", "state", "step-"
_WHOLE = "all"  # in place of a layer, where there are none
_BLOCK = 1 << 22


class Found(NamedTuple):
    """A checkpoint that is whole. info: what `Saver.save` was given: the step and whatever else."""

    path: Path
    step: int
    info: dict[str, Any]


def host_arrays(tree: Tree) -> dict[str, Any]:
    """A copy on the host of a tree whose leaves are `Placed` or arrays: {"0": {part: {path: {layer: array}}}, ...}."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda a: isinstance(a, Placed))
    return {
        str(i): _by_layer(leaf) if isinstance(leaf, Placed) else {_WHOLE: _fetch(leaf)} for i, leaf in enumerate(leaves)
    }


def _fetch(a: jax.Array) -> np.ndarray:
    if not a.is_fully_addressable:
        return np.asarray(multihost_utils.process_allgather(a, tiled=True))
    return np.array(a)  # a copy: the next step is given the array's memory


def _by_layer(placed: Placed) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    outer = {
        part: {path_name(path): {_WHOLE: _fetch(a)} for path, a in jax.tree_util.tree_leaves_with_path(module)}
        for part, module in placed.outer.items()
    }
    layers: dict[str, dict[str, np.ndarray]] = {}
    stacked = [jax.tree_util.tree_leaves_with_path(block) for block in placed.blocks]
    fetched = [{path_name(path): _fetch(a) for path, a in leaves} for leaves in stacked]
    for i in range(sum(placed.layout.layers)):
        stage, chunk, place = placed.layout.where(i)
        for name, a in fetched[place].items():
            layers.setdefault(name, {})[str(i)] = a[stage, chunk]
    return outer | {"block": layers}


def check_writable(folder: str, option: str = "save") -> None:
    """Make a folder where it is missing. Raises ValueError, naming the option, where nothing can be written into it."""
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        probe = Path(folder) / f".writable.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ValueError(f"{option}={folder!r} cannot be written ({error.strerror}): use another folder") from None


class Saver:
    """Writes checkpoints in the background, one at a time, and keeps the newest.

    Args: folder, made if missing; keep, how many. Raises ValueError where the folder cannot be made.
    """

    def __init__(self, folder: str, keep: int) -> None:
        self.folder, self.keep = Path(folder), keep
        self._thread: threading.Thread | None = None
        self._errors: list[BaseException] = []
        check_writable(folder)

    def save(self, step: int, tree: Tree, info: Mapping[str, Any]) -> None:
        """Copy a tree (see `host_arrays`) to the host, and write it in the background once the last one is written."""
        self.wait()
        arrays = host_arrays(tree)
        if jax.process_index() == 0:
            run = partial(self._run, step, arrays, dict(info) | {"step": step})
            self._thread = threading.Thread(target=run, name="checkpoint")
            self._thread.start()

    @property
    def writing(self) -> bool:
        """Whether a checkpoint is being written."""
        return self._thread is not None and self._thread.is_alive()

    def wait(self) -> None:
        """Wait until nothing is being written. Raises what went wrong while writing."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._errors:
            raise self._errors.pop()

    def _run(self, step: int, arrays: dict, info: dict[str, Any]) -> None:
        try:
            write(self.folder, step, arrays, info)
            prune(self.folder, self.keep)
        except BaseException as error:  # raised again by wait(), in the thread that can handle it
            self._errors.append(error)


def write(folder: Path, step: int, arrays: dict, info: dict[str, Any]) -> Path:
    """Write a checkpoint and return its folder: under another name, checksums last, then renamed."""
    target = folder / f"{_PREFIX}{step:08d}"
    hidden = folder / f".{target.name}.{os.getpid()}"
    shutil.rmtree(hidden, ignore_errors=True)
    hidden.mkdir()
    saver = _checkpointer()
    saver.save(hidden.absolute() / _STATE, args=ocp.args.PyTreeSave(arrays))
    saver.close()
    (hidden / _RUN).write_text(json.dumps(info, indent=2) + "\n")
    sums = {str(path.relative_to(hidden)): _checksum(path) for path in sorted(hidden.rglob("*")) if path.is_file()}
    with (hidden / _SUMS).open("w") as file:
        json.dump(sums, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    shutil.rmtree(target, ignore_errors=True)  # of a run that went another way
    os.replace(hidden, target)
    return target


def _checkpointer() -> ocp.Checkpointer:
    """Orbax for this process alone: it would wait for others, which have nothing to write."""
    me = jax.process_index()
    if jax.process_count() == 1:
        return ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    alone = ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me}, barrier_sync_key_prefix=f"process-{me}"
    )
    handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=alone)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _checksum(path: Path) -> list[int]:
    """A file's size and CRC-32."""
    crc = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            crc = zlib.crc32(block, crc)
    return [path.stat().st_size, crc]


def prune(folder: Path, keep: int) -> None:
    """Remove all but the newest checkpoints, and what dead processes have left half written."""
    for path in _steps(folder)[keep:]:
        shutil.rmtree(path, ignore_errors=True)
    for path in folder.glob(f".{_PREFIX}*"):
        pid = int(path.name.rsplit(".", 1)[1])
        if pid != os.getpid() and not Path(f"/proc/{pid}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _steps(folder: Path) -> list[Path]:
    """Folders of checkpoints, whole or not, the newest first."""
    return sorted((p for p in folder.glob(f"{_PREFIX}*") if p.is_dir()), reverse=True)


def fault_of(path: Path) -> str | None:
    """Why a checkpoint cannot be used, or None: every file has the size and checksum that it was written with."""
    try:
        sums = json.loads((path / _SUMS).read_text())
    except (OSError, ValueError):
        return f"{_SUMS} is missing or damaged, so it may not be whole"
    for name, want in sums.items():
        if not (path / name).is_file():
            return f"{name} is missing"
        size, crc = _checksum(path / name)
        if size != want[0]:
            return f"{name} has {size} bytes, it was written with {want[0]}"
        if crc != want[1]:
            return f"{name} is damaged: its checksum is not the one it was written with"
    return None


def latest(folder: str, option: str = "load") -> Found | None:
    """The newest whole checkpoint of a folder, or None where it has none at all. Damaged ones are warned about.

    folder may also be one checkpoint's. Raises ValueError where there are checkpoints but none is whole.
    """
    root = Path(folder)
    steps = [root] if root.name.startswith(_PREFIX) else _steps(root)
    for path in steps:
        fault = fault_of(path)
        if fault is None:
            info = json.loads((path / _RUN).read_text())
            return Found(path, info["step"], info)
        warnings.warn(f"{option}: {path} is passed over: {fault}", stacklevel=2)
    if steps:
        raise ValueError(f"{option}={folder!r} has no checkpoint that is whole: give another folder")
    return None


def check_same(option: str, saved: Mapping[str, Any], now: Mapping[str, Any], what: str) -> None:
    """Refuse, with a ValueError that names the field, a run that contradicts a checkpoint."""
    for name in sorted(saved.keys() | now.keys()):
        if saved.get(name) != now.get(name):
            raise ValueError(
                f"{option}: the checkpoint's {what} has {name}={saved.get(name)!r}, this run {now.get(name)!r}:"
                f" make them equal"
            )


def restore(found: Found, spec: Tree, shardings: Tree) -> Tree:
    """A tree as `Saver.save` was given, from a checkpoint of any layout.

    Args: spec, shapes and dtypes of the tree in this run's layout; shardings, of its leaves.
    """
    is_placed = lambda a: isinstance(a, Placed)
    leaves, tree = jax.tree.flatten(spec, is_leaf=is_placed)
    where = jax.tree.leaves(shardings, is_leaf=is_placed)

    def one(i: int, leaf: Any, at: Any) -> Any:
        if is_placed(leaf):
            return partition.assemble(leaf, at, weights(found, i, sum(leaf.layout.layers)))
        return jax.device_put(_read(found, str(i), [_WHOLE])[_WHOLE].astype(leaf.dtype), at)

    found_leaves = [one(i, *pair) for i, pair in enumerate(zip(leaves, where, strict=True))]
    return jax.tree.unflatten(tree, found_leaves)


def weights(found: Found, i: int, layers: int) -> Callable[[str, str, int | None], np.ndarray]:
    """A function (part, path, layer) -> array over the i-th `Placed` of a checkpoint (0: the parameters).

    It holds one parameter of all layers at a time.
    """
    held: dict[str, dict[str, np.ndarray]] = {}

    def weight(part: str, path: str, layer: int | None) -> np.ndarray:
        where = f"{i}/{part}/{path}"
        if where not in held:
            held.clear()
            held[where] = _read(found, where, [_WHOLE] if layer is None else [str(n) for n in range(layers)])
        return held[where][_WHOLE if layer is None else str(layer)]

    return weight


def _read(found: Found, where: str, names: list[str]) -> dict[str, np.ndarray]:
    """Arrays of a checkpoint: the keys below a place of its tree."""
    item: dict = dict.fromkeys(names, 0)
    keys = where.split("/")
    for key in reversed(keys):
        item = {key: item}
    args = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), item)
    reader = _checkpointer()
    tree = reader.restore(
        found.path.absolute() / _STATE, args=ocp.args.PyTreeRestore(item, restore_args=args, partial_restore=True)
    )
    reader.close()
    for key in keys:
        tree = tree[key]
    return tree
