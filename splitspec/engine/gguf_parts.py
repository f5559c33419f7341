"""The parts of a GGUF file that is split, and the one file that they come from."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gguf import GGUFReader, GGUFValueType, GGUFWriter

_SPLIT = ("split.no", "split.count", "split.tensors.count")


class WrongGGUFError(Exception):
    """What is wrong with a file, for people."""


def metadata(reader: GGUFReader, key: str) -> Any:
    """The file's value of that name; None when it has none."""
    field = reader.get_field(key)
    return None if field is None else field.contents()


def join(parts: Sequence[Path], path: Path) -> Path:
    """The whole file of these parts, in order: written to `path`, or a link to the only one. Raises
    WrongGGUFError unless they are all parts of one file.
    """
    readers = [GGUFReader(part) for part in parts]
    counts = []
    for place, (part, reader) in enumerate(zip(parts, readers, strict=True)):
        number, count, tensors = (metadata(reader, key) or 0 for key in _SPLIT)
        if (number, max(count, 1)) != (place, len(parts)):
            raise WrongGGUFError(
                f"{part.name} says that it is part {number + 1} of {max(count, 1)}, expected {place + 1} of "
                f"{len(parts)} (all parts beside each other, named as in NAME-00001-of-00003.gguf)"
            )
        counts.append(tensors)
    held = sum(len(reader.tensors) for reader in readers)
    if len(parts) > 1 and set(counts) != {held}:
        raise WrongGGUFError(f"its parts have {held} tensors and say {sorted(set(counts))}")
    if len(parts) == 1:
        path.symlink_to(parts[0])
    else:
        _write(readers, path)
    return path


def _write(readers: Sequence[GGUFReader], path: Path) -> None:
    writer = GGUFWriter(path, metadata(readers[0], "general.architecture"), endianess=readers[0].endianess)
    for field in readers[0].fields.values():
        if not field.name.startswith(("GGUF.", "split.")) and field.name != "general.architecture":
            inner = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(field.name, field.contents(), field.types[0], sub_type=inner)
    tensors = [tensor for reader in readers for tensor in reader.tensors]
    for tensor in tensors:
        data = tensor.data
        writer.add_tensor_info(tensor.name, data.shape, data.dtype, data.nbytes, tensor.tensor_type)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for tensor in tensors:
        writer.write_tensor_data(tensor.data, tensor_endianess=readers[0].endianess)
    writer.close()
