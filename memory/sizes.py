"""Sizes as people write and read them. Inside hetero a size is an int of bytes and its name ends in `_nbytes`."""

from __future__ import annotations

import re
from typing import Any

from hetero.io.errors import ConfigError

_UNITS = {
    "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40,
    "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
}  # fmt: skip
_SIZE = re.compile(r"(?P<number>\d{1,30}(?:\.\d{1,30})?) ?(?P<unit>[A-Za-z%]*)", re.ASCII)
_MAX_NBYTES = 1 << 62  # four exbibytes: beyond it is a typing error, and byte offsets are signed 64-bit numbers
_EXAMPLES = 'write it like "6GiB", "512MiB", "6GB", "80%", "auto", or a number of bytes'


def parse_size(value: int | str, *, available_nbytes: int | None = None, name: str, allow_zero: bool = False) -> int:
    """Return the bytes that a size option means.

    Takes a number of bytes (an int, or a string of digits), a decimal number with KiB MiB GiB TiB (binary) or
    KB MB GB TB (decimal), and, where `available_nbytes` says what 100 % is, a percentage or "auto" (all of it).
    Fractions of a byte are dropped. `name` is the option's name for the message. Raises ConfigError for anything else,
    bare `G` and lower-case `b` included: other tools disagree on what those mean.
    """
    if isinstance(value, str):
        nbytes = _parse_text(value, available_nbytes, name)
    elif isinstance(value, int) and not isinstance(value, bool):
        nbytes = value
    else:
        raise ConfigError(f"{name}={value!r} is a {type(value).__name__}, not a size; {_EXAMPLES}")
    if nbytes < 0 or (nbytes == 0 and not allow_zero):
        raise ConfigError(f"{name}={value!r} comes to {nbytes} bytes, and at least 1 is needed; {_EXAMPLES}")
    if nbytes > _MAX_NBYTES:
        raise ConfigError(f"{name}={value!r} is more than {format_size(_MAX_NBYTES)}; {_EXAMPLES}")
    return nbytes


def _parse_text(value: str, available_nbytes: int | None, name: str) -> int:
    text = value.strip()
    if text == "auto" or text.endswith("%"):
        if available_nbytes is None:
            raise ConfigError(f"{name}={value!r} needs to know how much there is, which {name} does not; name a size")
        if text == "auto":
            return available_nbytes
    match = _SIZE.fullmatch(text)
    if match is None:
        raise ConfigError(f"{name}={value!r} is not a size; {_EXAMPLES}")
    number, unit = match["number"], match["unit"]
    if unit == "%":
        return _percentage(number, available_nbytes or 0, name, value)
    if unit in _UNITS:
        return _scale(number, _UNITS[unit])
    if unit:
        raise ConfigError(f"{name}={value!r} has no unit hetero accepts: {_hint(number, unit)}")
    if "." in number:
        raise ConfigError(f"{name}={value!r} is a fraction without a unit; {_EXAMPLES}")
    return int(number)


def _percentage(number: str, available_nbytes: int, name: str, value: str) -> int:
    if float(number) > 100:
        raise ConfigError(f"{name}={value!r} is more than 100% of what is available")
    return _scale(number, available_nbytes) // 100


def _scale(number: str, unit_nbytes: int) -> int:
    """Multiply a decimal numeral exactly, in integers; a float would be off by bytes from 2**53 on."""
    whole, _, fraction = number.partition(".")
    unit_divisor: int = 10 ** len(fraction)
    return int(whole + fraction) * unit_nbytes // unit_divisor


def _hint(number: str, unit: str) -> str:
    """Name the spelling that was probably meant."""
    prefix, rest = unit[:1].upper(), unit[1:]
    if prefix in "KMGT" and rest.lower() in ("", "i", "b", "ib"):
        bits = "lower-case b means bits elsewhere; " if rest in ("b", "ib") else ""
        return f'{bits}write "{number}{prefix}iB" (1024-based) or "{number}{prefix}B" (1000-based)'
    if unit in ("B", "b", "bytes", "byte"):
        return f'a plain number is bytes; write "{number}"'
    return _EXAMPLES


def format_size(nbytes: int) -> str:
    """Return a size for people: one decimal of the largest binary unit that leaves at least 1."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if abs(nbytes) >= _UNITS[unit]:
            return f"{nbytes / _UNITS[unit]:.1f} {unit}"
    return f"{nbytes} bytes"


def format_need(nbytes: int) -> str:
    """Return a size for people that is never less than `nbytes`, in whole KiB at least."""
    for unit in ("TiB", "GiB", "MiB"):
        if nbytes >= _UNITS[unit]:
            return f"{-(-nbytes * 10 // _UNITS[unit]) / 10:.1f} {unit}"
    return f"{-(-nbytes // _UNITS['KiB'])} KiB"


def format_time(time_s: float) -> str:
    """Write a time with three digits: 0.0123 -> "12.3 ms", 2.5 -> "2.50 s", 0.00005 -> "0.05 ms"."""
    unit, value = ("s", time_s) if time_s >= 0.9995 else ("ms", time_s * 1e3)
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {unit}"


def parse_max_memory(max_memory: dict[Any, int | str]) -> tuple[int | str, int | str]:
    """Translate accelerate's `max_memory={0: "6GiB", "cpu": "16GiB"}` into (gpu_memory, cpu_memory).

    A missing GPU means none is used (0), as in accelerate; a missing "cpu" means "auto". Raises ConfigError for an
    unknown key or more than one GPU.
    """
    gpus = {key: size for key, size in max_memory.items() if isinstance(key, int) and not isinstance(key, bool)}
    unknown = [key for key in max_memory if key not in gpus and key != "cpu"]
    if unknown:
        raise ConfigError(f'max_memory has the key {unknown[0]!r}; known keys are one GPU number and "cpu"')
    if len(gpus) > 1:
        raise ConfigError(f"max_memory names {len(gpus)} GPUs ({sorted(gpus)}); hetero uses one: keep one of them")
    return next(iter(gpus.values()), 0), max_memory.get("cpu", "auto")
