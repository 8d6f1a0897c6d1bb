"""The structures of native.h that a pass is asked for with."""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

from paceline.targets.native.weights import CMatrix, Packed, pointer

if TYPE_CHECKING:
    from paceline.targets.parts import Norm

ROPES = 2  # tables of angles, at most


class CNorm(ctypes.Structure):
    _fields_ = (
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("epsilon", ctypes.c_float),
        ("centred", ctypes.c_int32),
    )


class CSpan(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int32) for name in ("batch", "width", "offset", "context")),
        *((name, ctypes.c_void_p) for name in ("starts", "depths", "ancestors", "counts")),
    )


class CRough(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_void_p) for name in ("matrix", "lengths", "off"))


class CEntry(ctypes.Structure):
    _fields_ = (
        ("embedding", ctypes.c_void_p),
        ("ids", ctypes.c_void_p),
        ("own", ctypes.c_void_p),
        ("scale", ctypes.c_float),
        ("norm", CNorm),
        ("matrix", CMatrix),
        ("joined", ctypes.c_int32),
        ("pieces", ctypes.c_int32),
        ("states", ctypes.c_void_p),
        ("piece_norm", CNorm),
        ("fuse", CMatrix),
    )


class CCall(ctypes.Structure):
    _fields_ = (
        ("span", CSpan),
        *((name, ctypes.c_int32) for name in ("threads", "first", "last", "logits_from", "unread")),
        *((name, ctypes.c_void_p * ROPES) for name in ("cosine", "sine")),
        ("cache", ctypes.c_void_p),
        ("entry", CEntry),
        *((name, ctypes.c_void_p) for name in ("beside", "taps", "skip", "hidden", "logits", "rough")),
        ("top", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("likeliest", "logps", "entropies")),
    )


def c_matrix(packed: Packed | None) -> CMatrix:
    """Null where there is none."""
    return packed.c if packed else CMatrix()


def c_norm(norm: Norm | None) -> CNorm:
    """Points into the norm, which is in float32."""
    return CNorm(pointer(norm.weight), pointer(norm.bias), norm.eps, norm.centred) if norm else CNorm()
