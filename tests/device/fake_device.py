"""A device without hardware: torch's PrivateUse1, with the CPU's memory and kernels and a GPU's rules.

There are two, "gpu:0" and "gpu:1". Their tensors cannot be mixed with each other or the CPU's, cannot become arrays,
and hold NaN until written. Kernels and waits can be counted, and float64 refused as MPS refuses it. `install`
adds the devices to a process permanently, so use a separate process.
"""

import ctypes
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME: Final = "gpu"
_MOVING: Final = ("aten::copy_", "aten::_copy_from", "aten::_copy_from_and_resize", "aten::_to_copy", "aten::set_")
_INDEXING: Final = ("aten::index", "aten::index_put_", "aten::_index_put_impl_", "aten::index_put")
_FILLING: Final = ("aten::masked_fill", "aten::masked_fill_", "aten::fill_", "aten::fill", "aten::where")
_WAITING: Final = (
    "aten::_local_scalar_dense", "aten::nonzero", "aten::equal", "aten::allclose", "aten::masked_select",
    "aten::_unique2", "aten::unique_consecutive", "aten::unique_dim", "aten::bincount",
    "aten::repeat_interleave.Tensor", "aten::_linalg_eigh", "aten::_linalg_svd", "aten::linalg_qr",
)  # fmt: skip
"""Operations whose result the CPU must know before it can continue."""
_ALIGNED: Final = 16
"""Memory comes in multiples of this many bytes, a multiple of every type's size."""


@dataclass
class Count:
    """Kernel launches on the device and waits of the CPU for it, by the line that caused them."""

    launches: Counter[str] = field(default_factory=Counter)
    waits: Counter[str] = field(default_factory=Counter)

    def total(self) -> tuple[int, int]:
        return self.launches.total(), self.waits.total()


_counts: list[Count] = []


@contextmanager
def counting() -> Iterator[Count]:
    """Counts launches and waits inside the block, in every thread."""
    _counts.append(count := Count())
    try:
        yield count
    finally:
        _counts.remove(count)


def _count(name: str, *, waits: bool = False) -> None:
    if not _counts:
        return
    frame: Any = sys._getframe(1)
    while frame is not None and not any(part in frame.f_code.co_filename for part in ("attnmech/", "transformers/")):
        frame = frame.f_back
    place = "elsewhere" if frame is None else f"{frame.f_code.co_filename.split('/attnmech/')[-1]}:{frame.f_lineno}"
    for count in _counts:
        (count.waits if waits else count.launches)[f"{name} {place}"] += 1


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )  # fmt: skip


class _DLManaged(ctypes.Structure):
    _fields_ = (("tensor", _DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


_EXTERNAL: Final = 12
"""dlpack's number for PrivateUse1."""
_held: dict[int, tuple[Tensor, Any]] = {}
"""The CPU's bytes behind each storage of the device, by their address, with what dlpack reads."""
_addresses: dict[int, int] = {}
"""The address of the bytes of each struct that dlpack may delete."""
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype, _capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def _delete(struct: int) -> None:
    del _held[_addresses.pop(struct)]


def _storage(room: Tensor, index: int) -> Tensor:
    shape = (ctypes.c_int64 * 1)(len(room))
    managed = _DLManaged(_DLTensor(room.data_ptr(), _EXTERNAL, index, 1, 1, 8, 1, shape, None, 0))
    managed.deleter = ctypes.cast(_delete, ctypes.c_void_p)
    _held[room.data_ptr()] = room, (managed, shape)
    _addresses[ctypes.addressof(managed)] = room.data_ptr()
    return torch._C._from_dlpack(_capsule(ctypes.addressof(managed), b"dltensor", None))


def _of_storage(base: Tensor, like: Tensor) -> Tensor:
    """The storage of a tensor of the device, in the type, shape and strides of another tensor."""
    with torch._C._AutoDispatchBelowAutograd():
        value = torch.ops.aten.alias(base)
        value = value if value.dtype == like.dtype else torch.ops.aten.view.dtype(value, like.dtype)
        return torch.ops.aten.as_strided_(value, like.size(), like.stride(), like.storage_offset())


def _uploaded(value: Tensor, index: int) -> Tensor:
    """A copy of a CPU tensor's whole storage on a device, in its type, shape and strides."""
    storage = torch.empty(0, dtype=torch.uint8).set_(value.untyped_storage())
    room = torch.empty(max(_ALIGNED, -(-len(storage) // _ALIGNED) * _ALIGNED), dtype=torch.uint8)
    room[: len(storage)] = storage
    return _of_storage(_storage(room, index), value)


def _on_cpu(value: Tensor) -> Tensor:
    room, _ = _held[value.untyped_storage().data_ptr()]
    return room.view(value.dtype).as_strided(value.size(), value.stride(), value.storage_offset())


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _tensors(part)


def _require_one_device(op: Any, args: Any, kwargs: Any) -> None:
    """Raises what CUDA raises for tensors of two devices."""
    name, everything = op._schema.name, [*args, *kwargs.values()]
    if name in _MOVING:
        return
    if any(isinstance(value, torch.Generator) for value in everything):
        raise RuntimeError(f"Expected a '{NAME}' device type for generator but found 'cpu'")
    if name in _INDEXING:  # indices may be on the CPU
        everything = [args[0], *args[2:]]
    numbers = torch.Tag.pointwise in op.tags or name in _FILLING or name in _INDEXING
    here = torch.device(NAME, _index([*args, *kwargs.values()]))
    for value in _tensors(everything):
        if value.device != here and not (numbers and value.ndim == 0 and value.device.type == "cpu"):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {here} and "
                f"{value.device}! (in {op}, a tensor of shape {list(value.shape)})"
            )


def _index(arguments: Any) -> int:
    return next((value.device.index for value in _tensors(arguments) if value.device.type == NAME), 0)


def _waits(op: Any, args: Any) -> bool:
    """Whether the CPU waits for the device: for a number, or for the count of a Boolean mask."""
    if op._schema.name in _INDEXING:
        return any(place.dtype in (torch.bool, torch.uint8) for place in _tensors(args[1]))
    return op._schema.name in _WAITING or op.name() in _WAITING


def _by_the_cpu(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Any operation: by the CPU's kernel, on the same memory."""
    _require_one_device(op, args, kwargs)
    if _waits(op, args):
        _count(op._schema.name, waits=True)
    pairs: list[tuple[Tensor, Tensor]] = []

    def down(value: Any) -> Any:
        if isinstance(value, Tensor) and value.device.type == NAME:
            pairs.append((_on_cpu(value), value))
            return pairs[-1][0]
        if isinstance(value, list | tuple):
            return type(value)(down(part) for part in value)
        return torch.device("cpu") if isinstance(value, torch.device) else value

    # torch hands a number that stands for a tensor (x % 2) to Python as a number, which has an overload of its own.
    as_number = any(
        isinstance(value, int | float) and str(argument.type) == "Tensor"
        for value, argument in zip(args, op._schema.arguments, strict=False)
    )
    with torch._C._AutoDispatchBelowAutograd():
        made = (op.overloadpacket if as_number else op)(
            *map(down, args), **{name: down(value) for name, value in kwargs.items()}
        )
    for cpu, device in pairs:  # `out=` and `resize_` may have given the CPU's tensor other memory or another shape
        if cpu.untyped_storage().data_ptr() != device.untyped_storage().data_ptr():
            device.data = _uploaded(cpu, device.device.index)
        elif (cpu.size(), cpu.stride()) != (device.size(), device.stride()):
            device.data = _of_storage(device, cpu)
    by_memory = {cpu.untyped_storage().data_ptr(): device for cpu, device in pairs}
    results, index = list(_tensors(made)), _index([*args, *kwargs.values()])
    if not results or op._schema.is_mutable or any(r.untyped_storage().data_ptr() not in by_memory for r in results):
        _count(op._schema.name)  # a view launches nothing

    def up(value: Any) -> Any:
        if isinstance(value, Tensor):
            _require_type(value.dtype)
            same = next((device for cpu, device in pairs if cpu is value), None)
            base = by_memory.get(value.untyped_storage().data_ptr())
            return same if same is not None else _uploaded(value, index) if base is None else _of_storage(base, value)
        return type(value)(up(part) for part in value) if isinstance(value, list | tuple) else value

    return up(made)


def _require_type(dtype: torch.dtype) -> None:
    """Raises what MPS raises for float64, if the device was installed without it."""
    if not _float64 and dtype in (torch.float64, torch.complex128):
        raise TypeError("Cannot convert a tensor to float64 dtype as the device does not support it. Use float32.")


def _empty(size: Any, dtype: Any = None, memory_format: Any = None, device: Any = None, **_: Any) -> Tensor:
    return _unwritten(torch.empty(size, dtype=dtype, memory_format=memory_format or torch.contiguous_format), device)


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = None, **_: Any) -> Tensor:
    return _unwritten(torch.empty_strided(size, stride, dtype=dtype), device)


def _unwritten(value: Tensor, device: torch.device) -> Tensor:
    _require_type(value.dtype)
    return _uploaded(value.fill_(torch.nan) if value.is_floating_point() else value, device.index or 0)


def _copied(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    if source.device == target.device:
        _count("aten::copy_")
    else:
        _count("to the CPU" if target.device.type == "cpu" else "from the CPU", waits=target.device.type == "cpu")
    with torch._C._AutoDispatchBelowAutograd():
        one, other = (value if value.device.type == "cpu" else _on_cpu(value) for value in (source, target))
        other.copy_(one)
    return target


class _Module(_DummyBackendModule):  # type: ignore[misc]
    """The functions that torch expects in `torch.gpu`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def device_count(self) -> int:
        return 2

    def set_device(self, device: Any) -> None:
        pass

    def synchronize(self, device: Any = None) -> None:
        pass


_registered: list[torch.library.Library] = []
_float64 = True


def install(*, float64: bool = True) -> None:
    """Makes "gpu:0" and "gpu:1" exist in this process; without `float64` they refuse that type, as MPS does."""
    global _float64  # noqa: PLW0603 - one kind of device in a process
    _float64 = float64
    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    every, aten = torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")
    every.fallback(_by_the_cpu, "PrivateUse1")
    every.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    for name, kernel in (
        ("empty.memory_format", _empty), ("empty_strided", _empty_strided), ("_copy_from", _copied),
        ("convolution_overrideable", partial(_by_the_cpu, torch.ops.aten.convolution.default)),
    ):  # fmt: skip
        aten.impl(name, kernel, "PrivateUse1")
    _registered.extend([every, aten])
    theirs = torch.Tensor.__deepcopy__

    def deepcopy(self: Tensor, memo: dict[int, Any]) -> Any:
        """torch would request a storage from the device, which makes storages only for tensors."""
        if self.device.type != NAME or id(self) in memo or type(self) is not Tensor:
            return theirs(self, memo)
        memo[id(self)] = copied = self.detach().clone().requires_grad_(self.requires_grad)
        return copied

    torch.Tensor.__deepcopy__ = deepcopy  # type: ignore[method-assign]
