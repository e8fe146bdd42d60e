"""Plain tensors of a torch.save file: from the record of a rebuild call to a byte offset.

Facts (torch 1.13 to 2.13): a dense tensor is `torch._utils._rebuild_tensor_v2(storage, offset,
size, stride, requires_grad, hooks[, metadata])`; for dtypes without a storage class (8-bit floats,
uint16/32/64) `_rebuild_tensor_v3(..., hooks, dtype[, metadata])` over an UntypedStorage whose
length counts bytes.
A Parameter is `_rebuild_parameter(tensor, requires_grad, hooks)`, a tensor with Python attributes
`torch._tensor._rebuild_from_type_v2(rebuild function, type, its arguments, state)`. A storage is
saved whole: a view may cover only part of it.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple, NoReturn

from merge_stream.containers.pickle_reader import Recorder, StorageRecord, dotted_name, is_class
from merge_stream.containers.torch_file import TorchFile
from merge_stream.errors import CorruptCheckpointError, UnsupportedError
from merge_stream.tensors.dtype import DType, dtype_of_storage, dtype_of_torch

__all__ = ["PlainTensor", "locate", "plain_tensor"]

_V2 = "torch._utils._rebuild_tensor_v2"
_V3 = "torch._utils._rebuild_tensor_v3"
_PARAMETER = ("torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state")
_FROM_TYPE = "torch._tensor._rebuild_from_type_v2"
_PLAIN_TYPES = ("torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer")
_KINDS = {
    "torch._utils._rebuild_qtensor": "a quantized tensor",
    "torch._utils._rebuild_sparse_tensor": "a sparse tensor",
    "torch._utils._rebuild_sparse_csr_tensor": "a sparse tensor",
    "torch._utils._rebuild_nested_tensor": "a nested tensor",
    "torch._utils._rebuild_meta_tensor_no_storage": "a meta tensor without data",
    "torch._utils._rebuild_device_tensor_from_numpy": "a device tensor saved through numpy",
    "torch._utils._rebuild_device_tensor_from_cpu_tensor": "a tensor of another device",
    "torch._utils._rebuild_xla_tensor": "an XLA tensor",
    "torch._utils._rebuild_wrapper_subclass": "a tensor subclass",
}
_LARGEST = 1 << 62
_DENSE = "turn it into a dense tensor before saving, or leave it out of the state dict"


class PlainTensor(NamedTuple):
    """A dense view of a storage: `offset` in elements, `storage` the key in its file."""

    dtype: DType
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    storage: str
    offset: int


def plain_tensor(value: Any, tensor: str, where: str) -> PlainTensor | None:  # noqa: ANN401 - any unpickled value
    """The dense tensor that `value` records, or None when it is no tensor of torch at all.

    UnsupportedError names the kind of a tensor that is not dense; CorruptCheckpointError when
    the record is malformed. `tensor` and `where` are the name and the file for messages.
    """
    while isinstance(value, Recorder) and value.dotted in _PARAMETER and value.args:
        value = value.args[0]
    if not isinstance(value, Recorder):
        return None
    dotted = value.dotted
    if dotted in (_V2, _V3):
        return _dense(dotted, value.args, tensor, where)
    if dotted == _FROM_TYPE:
        if len(value.args) != 4 or not is_class(value.args[0]) or type(value.args[2]) is not tuple:
            _malformed(tensor, where)
        rebuild = dotted_name(value.args[0])
        if rebuild in (_V2, _V3) and dotted_name(value.args[1]) in _PLAIN_TYPES:
            return _dense(rebuild, value.args[2], tensor, where)
        inner = value.args[2][0] if rebuild in _PARAMETER and value.args[2] else None
        if isinstance(inner, Recorder) and inner.dotted in (_V2, _V3):
            return _dense(inner.dotted, inner.args, tensor, where)
        kind = _KINDS.get(rebuild, "a tensor subclass")
        _refuse(f"{kind} ({dotted_name(value.args[1])})", tensor, where)
    if dotted in _KINDS:
        _refuse(_KINDS[dotted], tensor, where)
    return None


def locate(view: PlainTensor, file: TorchFile, tensor: str) -> int:
    """Byte offset in the file of the view's first element.

    CorruptCheckpointError when the view reaches outside its storage; UnsupportedError when its
    elements do not lie in row-major order without gaps.
    """
    dtype, shape, stride, key, offset = view
    storage = file.storages.get(key)
    size = math.prod(shape)
    if storage is None:
        if size:
            msg = f"{file.where}: {tensor} lies in storage {key}, which the file does not hold"
            raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
        return 0
    step = 1
    if size:
        for extent, actual in zip(reversed(shape), reversed(stride), strict=True):
            if extent != 1 and actual != step:
                msg = f"{file.where}: {tensor} has size {list(shape)} and stride {list(stride)}: not in row-major order"
                raise UnsupportedError(msg, hint="call .contiguous() on the tensor before saving")
            step *= extent
    if (offset + size) * dtype.itemsize > storage.nbytes:
        msg = (
            f"{file.where}: {tensor} needs {size} elements of {dtype} from element {offset} of storage {key}, "
            f"which has only {storage.nbytes} bytes"
        )
        raise CorruptCheckpointError(msg, hint="the file is damaged: copy it again")
    return storage.offset + offset * dtype.itemsize


def _dense(rebuild: str, args: tuple[Any, ...], tensor: str, where: str) -> PlainTensor:
    if len(args) < 4 + 3 * (rebuild == _V3):
        _malformed(tensor, where)
    storage, offset, shape, stride = args[:4]
    if type(storage) is not StorageRecord:
        _malformed(tensor, where)
    if type(shape) is not tuple or type(stride) is not tuple or type(offset) is not int:
        _malformed(tensor, where)
    if len(shape) != len(stride) or not 0 <= offset < _LARGEST:
        _malformed(tensor, where)
    if any(type(n) is not int or not 0 <= n < _LARGEST for n in (*shape, *stride)):
        _malformed(tensor, where)
    if rebuild == _V2:
        dtype, name = dtype_of_storage(storage.kind), storage.kind
        extra = args[6] if len(args) > 6 else None
    else:
        name = dotted_name(args[6])
        dtype = dtype_of_torch(name.removeprefix("torch.")) if is_class(args[6]) else None
        extra = args[7] if len(args) > 7 else None
    if dtype is None:
        _refuse(f"of type torch.{name.removeprefix('torch.')}, which safetensors cannot hold", tensor, where)
    if extra:  # conj / neg bits: the bytes are not the values
        _refuse("a lazily conjugated or negated view", tensor, where)
    return PlainTensor(dtype, shape, stride, storage.key, offset)


def _refuse(kind: str, tensor: str, where: str) -> NoReturn:
    msg = f"{where}: {tensor} is {kind}; it cannot be merged"
    raise UnsupportedError(msg, hint=_DENSE)


def _malformed(tensor: str, where: str) -> NoReturn:
    msg = f"{where}: the record of tensor {tensor} is malformed"
    raise CorruptCheckpointError(msg, hint="the file is damaged, or was not written by torch.save")
