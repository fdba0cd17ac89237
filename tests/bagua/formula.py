"""MinMaxUInt8 on Python's own numbers, an element at a time, every operation rounded to float32 once: it shares no line with the codec.

A sum, product or quotient of two float32 taken in float64 and then rounded to float32 is the float32 one: float64 has more than
twice the digits (Figueroa 1995, "When is double rounding innocuous?").
"""

import ctypes
import math

EPSILON = ctypes.c_float(1e-7).value


def f32(x: float) -> float:
    return ctypes.c_float(x).value


def quotient(a: float, b: float) -> float:
    return (
        f32(a / b)
        if b
        else math.nan
        if not a or math.isnan(a)
        else math.copysign(math.inf, a) * math.copysign(1, b)
    )


def rint(x: float) -> float:
    return float(round(x)) if math.isfinite(x) else x  # halves to even, as rint


def grid(least: float, greatest: float) -> tuple[float, float, float]:
    scale = quotient(255.0, f32(f32(greatest - least) + EPSILON))
    if not scale > 0:
        scale = math.nan
    upper = rint(f32(greatest * scale))
    return scale, upper, f32(upper - 255)


def encode(chunk: list[float]) -> tuple[list[int], list[float]]:
    if not chunk:
        return [], [0.0, 0.0]
    least, greatest = (
        (math.nan, math.nan)
        if any(map(math.isnan, chunk))
        else (min(chunk) + 0.0, max(chunk) + 0.0)
    )
    scale, upper, lower = grid(least, greatest)
    codes = []
    for x in chunk:
        level = rint(f32(x * scale))
        raw = f32((upper if level > upper else level) - lower)
        codes.append(int(raw) if 0 <= raw < 256 else 0)
    return codes, [least, greatest]


def decode(codes: list[int], bounds: list[float]) -> list[float]:
    scale, _, lower = grid(*bounds)
    return [quotient(f32(code + lower), scale) for code in codes]
