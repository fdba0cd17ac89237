"""MinMaxUInt8 on Python floats, one element at a time. It shares no code with the plugin.

Every operation is computed in float64 and rounded to float32 once. For a sum, product or quotient
of two float32 numbers the result is that of float32, because float64 has more than twice the digits
(Figueroa 1995, "When is double rounding innocuous?").
"""

import ctypes
import math

EPSILON = ctypes.c_float(1e-7).value


def f32(x: float) -> float:
    return ctypes.c_float(x).value


def quotient(a: float, b: float) -> float:
    if b:
        return f32(a / b)
    if not a or math.isnan(a):
        return math.nan
    return math.copysign(math.inf, a) * math.copysign(1, b)


def rint(x: float) -> float:
    return float(round(x)) if math.isfinite(x) else x  # rounds halves to even, as rint


def grid(least: float, greatest: float) -> tuple[float, float, float]:
    scale = quotient(255.0, f32(f32(greatest - least) + EPSILON))
    if not scale > 0:
        scale = math.nan
    upper = rint(f32(greatest * scale))
    return scale, upper, f32(upper - 255)


def encode(chunk: list[float]) -> tuple[list[int], list[float]]:
    if not chunk:
        return [], [0.0, 0.0]
    least, greatest = min(chunk) + 0.0, max(chunk) + 0.0
    if any(map(math.isnan, chunk)):
        least, greatest = math.nan, math.nan
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
