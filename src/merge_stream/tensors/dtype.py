"""One table of element types: safetensors name, torch names, item size, numpy view.

Facts: safetensors 0.8 (names), torch 2.13 (`torch.<X>Storage` classes, dtype names).
bf16 and 8-bit floats have no numpy type of their own; ml_dtypes gives them one, imported
only when values are needed. Moving bytes never needs it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import numpy as np

__all__ = [
    "DTYPES",
    "F8_E4M3",
    "F32",
    "I8",
    "I32",
    "I64",
    "U8",
    "DType",
    "dtype_named",
    "dtype_of_storage",
    "dtype_of_torch",
    "promoted",
]

Kind = Literal["float", "int", "bool", "quantized", "complex"]


@dataclass(frozen=True, slots=True)
class DType:
    """An element type.

    `name` is the safetensors spelling ("BF16"), `torch_name` the torch one ("bfloat16"),
    `storage` the torch storage class that implies it (or empty), `itemsize` in bytes.
    Only kind "float" is ever cast; "quantized" are 8-bit floats, which mean nothing
    without their scales.
    """

    name: str
    torch_name: str
    storage: str
    itemsize: int
    kind: Kind

    def numpy(self) -> np.dtype[Any]:
        """The numpy dtype of the values (through ml_dtypes where numpy has none)."""
        import numpy as np

        if self.torch_name in _ML_DTYPES:
            import ml_dtypes

            special: np.dtype[Any] = np.dtype(getattr(ml_dtypes, _ML_DTYPES[self.torch_name]))
            return special
        plain: np.dtype[Any] = np.dtype("bool" if self.kind == "bool" else self.torch_name)
        return plain

    def __str__(self) -> str:
        return self.name


_ML_DTYPES = {
    "bfloat16": "bfloat16",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float8_e4m3fnuz": "float8_e4m3fnuz",
    "float8_e5m2fnuz": "float8_e5m2fnuz",
    "float8_e8m0fnu": "float8_e8m0fnu",
}

DTYPES: tuple[DType, ...] = (
    DType("F64", "float64", "DoubleStorage", 8, "float"),
    DType("F32", "float32", "FloatStorage", 4, "float"),
    DType("BF16", "bfloat16", "BFloat16Storage", 2, "float"),
    DType("F16", "float16", "HalfStorage", 2, "float"),
    DType("I64", "int64", "LongStorage", 8, "int"),
    DType("I32", "int32", "IntStorage", 4, "int"),
    DType("I16", "int16", "ShortStorage", 2, "int"),
    DType("I8", "int8", "CharStorage", 1, "int"),
    DType("U8", "uint8", "ByteStorage", 1, "int"),
    DType("U16", "uint16", "", 2, "int"),
    DType("U32", "uint32", "", 4, "int"),
    DType("U64", "uint64", "", 8, "int"),
    DType("BOOL", "bool", "BoolStorage", 1, "bool"),
    DType("C64", "complex64", "ComplexFloatStorage", 8, "complex"),
    DType("F8_E4M3", "float8_e4m3fn", "", 1, "quantized"),
    DType("F8_E5M2", "float8_e5m2", "", 1, "quantized"),
    DType("F8_E4M3FNUZ", "float8_e4m3fnuz", "", 1, "quantized"),
    DType("F8_E5M2FNUZ", "float8_e5m2fnuz", "", 1, "quantized"),
    DType("F8_E8M0", "float8_e8m0fnu", "", 1, "quantized"),
)

F32 = DTYPES[1]
"""The type of master weights."""

_BY_NAME = {d.name: d for d in DTYPES}

F8_E4M3, I8, I32, I64, U8 = (_BY_NAME[name] for name in ("F8_E4M3", "I8", "I32", "I64", "U8"))
"""The types of what quantization writes."""

_BY_TORCH = {d.torch_name: d for d in DTYPES} | {
    alias: next(d for d in DTYPES if d.torch_name == name)
    for alias, name in {
        "float": "float32",
        "double": "float64",
        "half": "float16",
        "long": "int64",
        "int": "int32",
    }.items()
}
_BY_STORAGE = {d.storage: d for d in DTYPES if d.storage}


def dtype_named(name: str) -> DType | None:
    """The type with this safetensors name, or None."""
    return _BY_NAME.get(name)


def dtype_of_torch(name: str) -> DType | None:
    """The type that `torch.<name>` is, or None ("bfloat16" -> BF16)."""
    return _BY_TORCH.get(name)


def dtype_of_storage(name: str) -> DType | None:
    """The type that a `torch.<name>` storage class implies ("HalfStorage" -> F16), or None."""
    return _BY_STORAGE.get(name)


def promoted(a: DType, b: DType) -> DType:
    """The floating type in which torch computes with both (bf16 and fp16 give fp32)."""
    if a.itemsize != b.itemsize:
        return a if a.itemsize > b.itemsize else b
    return a if a == b else _BY_NAME["F32"]
