"""Opens GGUF files, whole or split, and reads their metadata as checked Python values."""

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import gguf
import numpy as np

from semantic.domain.errors import InvalidRequestError, ModelNotFoundError

_MAX_INT = 2**31 - 1
# llama.cpp's names of the parts of a split file: model-00001-of-00003.gguf.
_PART = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")

_T = TypeVar("_T", int, float, str, bool, list[Any])


@dataclass(frozen=True, slots=True)
class GgufFile:
    """An opened file: metadata as Python values, tensors by their GGUF names.

    Attributes:
        path: The file, or the first part of a split one.
    """

    path: Path
    fields: Mapping[str, object]
    tensors: Mapping[str, gguf.ReaderTensor]

    @property
    def architecture(self) -> str:
        return self.get("general.architecture", str)

    def find(self, key: str, kind: type[_T]) -> _T | None:
        """Return a metadata value, or None if it is missing; rejects invalid values.

        Invalid are: another type, NaN or infinity (also in a list), and integers that are negative
        or above 2^31 - 1, such as 2^32 - 1, which stands for -1.
        """
        value = self.fields.get(key)
        if value is None:
            return None
        if type(value) is not kind:
            raise self.refusal(f"{key} is {type(value).__name__}; expected {kind.__name__}")
        if (problem := _number_problem(value)) is not None:
            raise self.refusal(f"{key} {problem}")
        return value

    def get(self, key: str, kind: type[_T]) -> _T:
        value = self.find(key, kind)
        if value is None:
            raise self.refusal(f"metadata key {key} is missing")
        return value

    def find_here(self, key: str, kind: type[_T]) -> _T | None:
        """Return a value of the architecture's own section, or None if it is missing."""
        return self.find(f"{self.architecture}.{key}", kind)

    def get_here(self, key: str, kind: type[_T]) -> _T:
        return self.get(f"{self.architecture}.{key}", kind)

    def per_layer(self, key: str) -> list[Any]:
        """A value of the architecture's section that is given once, or once for every layer."""
        name = f"{self.architecture}.{key}"
        if isinstance(self.fields.get(name), list):
            return self.get(name, list)
        return [self.get(name, int)] * min(self.get_here("block_count", int), len(self.tensors))

    def refusal(self, why: str) -> InvalidRequestError:
        return InvalidRequestError(f"cannot import {self.path}: {why}.", param="model")


def decimal(value: float) -> float:
    """The shortest decimal that rounds to the same float32: 1e-05, not 9.999999747e-06."""
    return float(str(np.float32(value)))


def _number_problem(value: object) -> str | None:
    for number in value if isinstance(value, list) else (value,):
        if isinstance(number, float) and not math.isfinite(number):
            return f"is or contains {number}; expected finite numbers"
    if isinstance(value, int) and not 0 <= value <= _MAX_INT:
        return f"is {value}; expected a number from 0 to {_MAX_INT}"
    return None


def gguf_parts(path: Path) -> list[Path]:
    """All parts of a split file, the first one first; a file that is not split is its only part."""
    if (named := _PART.fullmatch(path.name)) is None:
        return [path]
    count = int(named["count"])
    names = (f"{named['stem']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1))
    return [path.with_name(name) for name in names]


def open_gguf(path: Path) -> GgufFile:
    """Open a file with all its parts; tensors stay on disk until they are read.

    Raises:
        ModelNotFoundError: The file or one of its parts does not exist.
        InvalidRequestError: The file is damaged, or not a GGUF file.
    """
    parts = gguf_parts(path)
    if path.is_file() and (missing := [part.name for part in parts if not part.is_file()]):
        raise ModelNotFoundError(
            f"part {missing[0]} of the model is missing in {path.parent}: "
            f"all {len(parts)} parts must be in one directory."
        )
    file = _open_part(parts[0] if path.is_file() else path)
    tensors = dict(file.tensors)
    for part in parts[1:]:
        tensors |= _open_part(part).tensors
    count, expected = len(parts), file.find("split.count", int) or 1
    if expected != count and len(parts) == 1:
        raise file.refusal(
            f"it is one of {expected} parts; name them <model>-00001-of-{expected:05d}.gguf"
        )
    num_tensors = file.find("split.tensors.count", int)
    if num_tensors not in (None, len(tensors)):
        raise file.refusal(f"its parts have {len(tensors)} tensors; expected {num_tensors}")
    return GgufFile(file.path, file.fields, tensors)


class _Reader(gguf.GGUFReader):  # type: ignore[misc]  # the package has no types
    """Reads an array of metadata at once; the library takes many seconds for a vocabulary."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], Any, Any]:
        kinds = gguf.GGUFValueType
        if kinds(raw_type) != kinds.ARRAY or self.byte_order != "I":
            found: tuple[int, list[Any], Any, Any] = super()._get_field_parts(orig_offs, raw_type)
            return found
        kind = kinds(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == kinds.STRING:
            texts = self._texts(start, count)
            size = sum(8 + len(text) for text in texts)
            return 12 + size, texts, range(count), [kinds.ARRAY, kind]
        if kind == kinds.ARRAY or count > len(self.data):
            raise ValueError(f"array of {count} values of type {kind.name}")
        values = self._get(start, self.gguf_scalar_to_np[kind], count)
        return 12 + int(values.nbytes), [values], [0], [kinds.ARRAY, kind]

    def _texts(self, start: int, count: int) -> list[memoryview]:
        raw, texts = memoryview(self.data), []
        for _ in range(count):
            end = start + 8 + int.from_bytes(raw[start : start + 8], sys.byteorder)
            if end > len(raw):
                raise ValueError("the file ends within its metadata")
            texts.append(raw[start + 8 : end])
            start = end
        return texts


def _open_part(path: Path) -> GgufFile:
    try:
        reader = _Reader(path)
        fields = {key: field.contents() for key, field in reader.fields.items()}
    except FileNotFoundError as error:
        raise ModelNotFoundError(f"model file {path} does not exist.") from error
    except OSError as error:
        why = f"cannot read {path}: {error.strerror}."
        raise InvalidRequestError(why, param="model") from error
    # The reader validates little; the exception depends on where the damage is.
    except (ValueError, LookupError, TypeError, ArithmeticError, MemoryError) as error:
        why = f"{path} is not a GGUF file, or it is damaged or incomplete ({error})."
        raise InvalidRequestError(why, param="model") from error
    file = GgufFile(path, fields, {tensor.name: tensor for tensor in reader.tensors})
    if reader.byte_order != "I":
        raise file.refusal("its byte order differs from this machine's")
    return file
