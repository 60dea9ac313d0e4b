"""Writes GGUF files for the tests: metadata, and tensors that are quantised already."""

import struct

import numpy as np

STRING, ARRAY = 8, 9


def _string(text):
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _value(value):
    """(type, bytes) of a metadata value."""
    if isinstance(value, bool):
        return 7, struct.pack("<?", value)
    if isinstance(value, int):
        return 4, struct.pack("<I", value)
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, str):
        return STRING, _string(value)
    kind, _ = _value(value[0])
    items = b"".join(_value(item)[1] for item in value)
    return ARRAY, struct.pack("<IQ", kind, len(value)) + items


def write_gguf(path, metadata, tensors, align=32):
    """`tensors`: name -> (type number, shape outermost first, bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(metadata))
    for key, value in metadata.items():
        kind, data = _value(value)
        head += _string(key) + struct.pack("<I", kind) + data
    offset = 0
    for name, (kind, shape, data) in tensors.items():
        head += _string(name) + struct.pack("<I", len(shape))
        head += struct.pack(f"<{len(shape)}Q", *reversed(shape)) + struct.pack("<IQ", kind, offset)
        offset += -(-len(data) // align) * align
    body = b"".join(d.ljust(-(-len(d) // align) * align, b"\0") for _, _, d in tensors.values())
    path.write_bytes(head.ljust(-(-len(head) // align) * align, b"\0") + body)


def float32(array):
    """A tensor as it is."""
    return 0, array.shape, np.ascontiguousarray(array, np.float32).tobytes()
