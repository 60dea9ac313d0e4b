"""Writes SentencePiece models for the tests: the few fields of sentencepiece_model.proto."""

import struct

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
SPECIAL = [("<unk>", 0.0, UNKNOWN), ("<s>", 0.0, CONTROL), ("</s>", 0.0, CONTROL)]
BYTES = [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]


def _varint(value):
    value &= (1 << 64) - 1
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def message(fields):
    """`fields`: pairs of a number and an int, a float, a text or bytes."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        elif isinstance(value, float):
            out += _varint(number << 3 | 5) + struct.pack("<f", value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | 2) + _varint(len(data)) + data
    return out


def write_model(path, pieces, kind=2, trainer=(), normalizer=((4, 0),)):
    """`pieces`: text, score, type; BPE and no squeezing of spaces unless told."""
    listed = [(1, message([(1, text), (2, score), (3, type_)])) for text, score, type_ in pieces]
    fallback = any(type_ == BYTE for _, _, type_ in pieces)
    trained = (2, message([(3, kind), (35, int(fallback)), (43, -1), *trainer]))
    path.write_bytes(message([*listed, trained, (3, message(normalizer))]))
    return path
