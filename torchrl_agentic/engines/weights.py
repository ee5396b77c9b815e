"""Weights on their way to an engine: into a module, as named tensors, and in folders of safetensors files."""

# torch and safetensors annotate few results.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import asyncio
import shutil
import tempfile
from collections.abc import AsyncGenerator, Generator, Iterable, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

if TYPE_CHECKING:
    import torch

Weights: TypeAlias = "Mapping[str, torch.Tensor] | Iterable[tuple[str, torch.Tensor]] | torch.nn.Module"

T = TypeVar("T")

_MEMORY = Path("/dev/shm")
_SHOWN = 3
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"


def load_weights(module: Any, weights: Any) -> None:
    """Load weights into a module of PyTorch.

    Args:
        module: The module.
        weights: A state dict; a TensorDict with the same names, nested or not; another module with the same
            names; a function that is called with the module; or None to keep its weights.

    Raises:
        TypeError: If `weights` is of another type.
        RuntimeError: If a state dict lacks names or has others.
    """
    import torch

    if weights is None:
        return
    named: Any = weights
    if hasattr(weights, "flatten_keys"):  # a TensorDict, which is a Mapping too
        named = weights.flatten_keys(".")
    elif isinstance(weights, torch.nn.Module):  # before functions, since a module can be called too
        named = weights.state_dict()
    elif not isinstance(weights, Mapping) and callable(weights):
        weights(module)
        return
    elif not isinstance(weights, Mapping):
        raise TypeError(
            "weights are a state dict, a TensorDict, a module, a function of the model, or None; "
            f"got {type(weights).__name__}"
        )
    computed = set[str]()
    if isinstance(module, torch.nn.Module):  # buffers that `TensorDict.from_module` has, and no state dict
        computed = {name for name, _ in module.named_buffers()}.difference(module.state_dict())
    module.load_state_dict({name: value for name, value in named.items() if name not in computed})


def named_tensors(weights: Weights) -> dict[str, torch.Tensor]:
    """Return weights by the names that the checkpoint gives them.

    Args:
        weights: A state dict, a TensorDict, pairs of a name and a tensor, or a module.

    Raises:
        TypeError: If they have another type.
    """
    import torch

    if isinstance(weights, torch.nn.Module):
        weights = weights.state_dict()
    found: Any = weights
    if hasattr(found, "flatten_keys"):  # a TensorDict
        found = found.flatten_keys(".")
    if not isinstance(found, Mapping | Iterable) or isinstance(found, str | bytes | torch.Tensor):
        raise TypeError(
            "weights are a state dict, a TensorDict, pairs of a name and a tensor, a module, or the path of a"
            f" folder with safetensors files; got {type(weights).__name__}"
        )
    pairs: list[Any] = list(found.items() if isinstance(found, Mapping) else found)
    for pair in pairs:
        if not (
            isinstance(pair, tuple)
            and len(pair) == 2
            and isinstance(pair[0], str)
            and isinstance(pair[1], torch.Tensor)
        ):
            raise TypeError(f"weights are pairs of a name and a tensor; got {pair!r:.200}")
    return {name: tensor for name, tensor in pairs if ".rotary_emb." not in name}  # computed, never loaded


def kept_weights(weights: Any) -> Any:
    """Return a copy of weights in the memory of the CPU, which no optimizer changes.

    Args:
        weights: A module, a TensorDict, a mapping, or pairs of a name and a tensor, which are copied; or a
            folder, function or other object, which is returned as it is.
    """
    import torch

    if isinstance(weights, torch.nn.Module):
        return kept_weights(weights.state_dict())
    if isinstance(weights, torch.Tensor):
        return weights.detach().to("cpu", copy=True)
    if hasattr(weights, "flatten_keys"):  # a TensorDict
        return weights.detach().to("cpu").clone()
    if isinstance(weights, Mapping):
        return {name: kept_weights(value) for name, value in weights.items()}
    if isinstance(weights, list | tuple):
        return type(weights)(kept_weights(value) for value in weights)
    return weights


@contextmanager
def weights_folder(
    weights: Weights | str | Path, *, is_tied: bool = False, parent: str | Path | None = None
) -> Generator[Path]:
    """Yield a folder with the weights in safetensors files, which is deleted afterwards.

    Args:
        weights: The weights as `named_tensors` takes them, or the path of a folder that has them already,
            which stays as it is.
        is_tied: The head of the model shares the weights of its embedding. Checkpoints leave it out then; the
            folder has it, because vLLM on the CPU has a head of its own, which would keep the old weights.
        parent: Folder for the new folder; by default the memory of the machine if it has room, and the folder
            for temporary files otherwise.

    Raises:
        ValueError: If there are no weights.
    """
    from safetensors.torch import save_file

    links, tensors = _read(weights, is_tied)
    size = sum(tensor.nbytes for tensor in tensors.values())
    folder = Path(tempfile.mkdtemp(prefix="weights-", dir=_parent_of(size) if parent is None else parent))
    try:
        for link in links:
            (folder / link.name).symlink_to(link.resolve())
        if tensors:
            save_file(tensors, folder / "tensors.safetensors", metadata={"format": "pt"})
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read(weights: Weights | str | Path, is_tied: bool) -> tuple[list[Path], dict[str, torch.Tensor]]:
    """Return the files to link, and the weights to write."""
    links: list[Path] = []
    if isinstance(weights, str | Path):
        links = sorted(Path(weights).glob("*.safetensors"))
        if not links:
            raise ValueError(f"no safetensors files in {weights}: save_pretrained(...) writes them")
        if is_tied and _HEAD not in checkpoint_shapes(weights):
            return links, _head_of(links)
        return links, {}
    tensors = named_tensors(weights)
    if not tensors:
        raise ValueError("there are no weights; None keeps those of the engine")
    if is_tied and _HEAD not in tensors and _EMBEDDING in tensors:
        tensors[_HEAD] = tensors[_EMBEDDING]
    return links, _separate(tensors)


def _head_of(files: list[Path]) -> dict[str, torch.Tensor]:
    """Return the embedding as a head, if one of the files has it."""
    from safetensors import safe_open

    for path in files:
        with safe_open(path, framework="pt") as file:
            if _EMBEDDING in file.keys():  # noqa: SIM118  no mapping
                return {_HEAD: file.get_tensor(_EMBEDDING)}
    return {}


@asynccontextmanager
async def in_thread(context: AbstractContextManager[T]) -> AsyncGenerator[T]:
    """Enter and leave a context in a thread, because it reads and writes files.

    Args:
        context: The context manager.
    """
    value = await asyncio.to_thread(context.__enter__)
    try:
        yield value
    finally:
        await asyncio.to_thread(context.__exit__, None, None, None)


def checkpoint_shapes(folder: str | Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the weights in the safetensors files of a folder, by name; empty if it has none.

    Args:
        folder: A folder as `save_pretrained` writes it.
    """
    from safetensors import safe_open

    shapes: dict[str, tuple[int, ...]] = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            shapes.update({name: tuple(file.get_slice(name).get_shape()) for name in file.keys()})  # noqa: SIM118  no mapping
    return shapes


def check_fits(new: Mapping[str, tuple[int, ...]], old: Mapping[str, tuple[int, ...]]) -> None:
    """Check that weights can replace those of a checkpoint; an engine that loads others may break.

    Args:
        new: Shapes of the new weights, by name. A head that shares the weights of the embedding may be among
            them, or missing.
        old: Shapes of the weights of the checkpoint; nothing is checked if they are empty.

    Raises:
        ValueError: If weights are missing, unknown or of another shape.
    """
    if not old:
        return
    missing = [name for name in old if name not in new and not _is_head(name)]
    unknown = [name for name in new if name not in old and not _is_head(name)]
    if missing or unknown:
        parts = (("missing", missing), ("unknown", unknown))
        found = "; ".join(f"{what}: {_shown(names)}" for what, names in parts if names)
        raise ValueError(f"the weights are not those of the engine's checkpoint: {found}")
    other = [name for name in new if name in old and new[name] != old[name]]
    if other:
        name = other[0]
        raise ValueError(
            f"{len(other)} of the weights have another shape than in the engine's checkpoint: {name} has"
            f" {new[name]} instead of {old[name]}"
        )


def _is_head(name: str) -> bool:
    """Check for the name of a head, which a checkpoint leaves out if it shares the embedding's weights."""
    return name.endswith("lm_head.weight")


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(islice(names, _SHOWN)) + more


def _separate(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous tensors on the CPU that share no memory with each other, as the file format needs."""
    separate: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, given in tensors.items():
        whole: Any = given
        if hasattr(whole, "full_tensor"):  # a DTensor, sharded by FSDP
            whole = whole.full_tensor()
        tensor: torch.Tensor = whole.detach().cpu().contiguous()
        place = tensor.untyped_storage().data_ptr()
        separate[name] = tensor.clone() if place in seen else tensor
        seen.add(place)
    return separate


def _parent_of(size: int) -> Path | None:
    """Return a folder in memory with room for a file, or None."""
    return _MEMORY if _MEMORY.is_dir() and shutil.disk_usage(_MEMORY).free > 2 * size else None
