"""The structs of the C interface (`src/*.h`), field by field. `library` compares their sizes with those that were compiled."""

import ctypes
from enum import IntEnum

Int = ctypes.c_int32
Long = ctypes.c_int64
Float = ctypes.c_float
Pointer = ctypes.c_void_p


class WeightFormat(IntEnum):
    """`enum weight_format` of product.h."""

    F32 = 0
    F16 = 1
    BF16 = 2
    BF16_DOT = 3


class CacheFormat(IntEnum):
    """`enum cache_format` of attention.h."""

    F32 = 0
    F16 = 1
    BF16 = 2


class Activation(IntEnum):
    """`enum activation` of rows.h."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    RELU = 3
    RELU_SQUARED = 4


class OperationKind(IntEnum):
    """`enum operation_kind` of tape.h."""

    EMBED = 0
    KEEP = 1
    NORM = 2
    PRODUCT = 3
    ANGLES = 4
    ROTATE = 5
    WRITE = 6
    ATTEND = 7
    ACTIVATE = 8
    SCALE = 9
    SUMMARIZE = 10


class WeightStruct(ctypes.Structure):
    """`struct weight` of product.h."""

    _fields_ = [
        ("panels", Pointer),
        ("bias", Pointer),
        ("format", Int),
        ("num_outputs", Int),
        ("num_inputs", Int),
    ]


class NormStruct(ctypes.Structure):
    """`struct norm` of rows.h."""

    _fields_ = [
        ("scale", Pointer),
        ("bias", Pointer),
        ("epsilon", Float),
        ("num_heads", Int),
        ("width", Int),
        ("is_centered", Int),
        ("adds", Int),
    ]


class RotationStruct(ctypes.Structure):
    """`struct rotation` of rows.h."""

    _fields_ = [
        ("frequencies", Pointer),
        ("scaling", Float),
        ("num_heads", Int),
        ("head_dim", Int),
        ("pairs", Int),
        ("is_interleaved", Int),
    ]


class AttentionStruct(ctypes.Structure):
    """`struct attention` of attention.h."""

    _fields_ = [
        ("keys", Pointer),
        ("values", Pointer),
        ("sinks", Pointer),
        ("format", Int),
        ("block_size", Int),
        ("num_heads", Int),
        ("num_kv_heads", Int),
        ("key_dim", Int),
        ("value_dim", Int),
        ("window", Int),
        ("scaling", Float),
        ("softcap", Float),
    ]


class ChunkStruct(ctypes.Structure):
    """`struct chunk` of attention.h."""

    _fields_ = [("block_ids", Pointer), ("start", Int), ("num_rows", Int), ("first_row", Int)]


class OperationStruct(ctypes.Structure):
    """`struct operation` of tape.h."""

    _fields_ = [
        ("kind", Int),
        ("of_kept", Int),
        ("rounds", Int),
        ("adds", Int),
        ("width", Int),
        ("activation", Int),
        ("is_gated", Int),
        ("factor", Float),
        ("cap", Float),
        ("x", Pointer),
        ("y", Pointer),
        ("x_stride", Long),
        ("y_stride", Long),
        ("weight", WeightStruct),
        ("norm", NormStruct),
        ("rotation", RotationStruct),
        ("attention", AttentionStruct),
    ]


class StepStruct(ctypes.Structure):
    """`struct step` of tape.h."""

    _fields_ = [
        ("token_ids", Pointer),
        ("kept", Pointer),
        ("chunks", Pointer),
        ("num_rows", Int),
        ("num_kept", Int),
        ("num_chunks", Int),
    ]
