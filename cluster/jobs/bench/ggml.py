"""ggml's CPU dot products, from a compiled library where there is one: what `tiermoe bench kernel` compares with."""

from __future__ import annotations

import ctypes
import importlib.metadata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ....errors import ConfigError
from ....kernels import _cpu

WHEELS = ("llama-cpp-python", "pywhispercpp", "stable-diffusion-cpp-python")
SAMPLE_ROWS = 32  # rows that are really quantized; a matrix repeats them, which changes no time


@dataclass(frozen=True)
class Format:
    """A weight format of ggml: its number in `ggml_type`, its dot product, and how that wants the activations."""

    name: str
    code: int
    dot: str
    quantize: str
    block: int  # values per block of the activations
    block_bytes: int


FORMATS = (
    Format("Q4_0", 2, "ggml_vec_dot_q4_0_q8_0", "quantize_row_q8_0", 32, 34),
    Format("Q3_K", 11, "ggml_vec_dot_q3_K_q8_K", "quantize_row_q8_K", 256, 292),
    Format("Q2_K", 10, "ggml_vec_dot_q2_K_q8_K", "quantize_row_q8_K", 256, 292),
)


class Ggml:
    """The functions of one library.

    Args:
        library: libggml-cpu*.so; what it needs lies beside it or is in it.

    Raises:
        ConfigError: it cannot be loaded, or lacks a function.
    """

    def __init__(self, library: Path) -> None:
        try:
            beside = sorted(library.parent.glob("libggml-base*.so*"))
            base = ctypes.CDLL(str(beside[0]), mode=ctypes.RTLD_GLOBAL) if beside else None
            self._cpu = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            self._cpu.ggml_cpu_init()
            self._row_size = (base or self._cpu).ggml_row_size
            self._chunk = (base or self._cpu).ggml_quantize_chunk
            for f in FORMATS:
                getattr(self._cpu, f.dot)
                getattr(self._cpu, f.quantize)
        except (OSError, AttributeError) as error:
            raise ConfigError(f"{library} is no ggml CPU library: {error}", "give a libggml-cpu*.so") from error
        self.library = library
        self._row_size.restype, self._row_size.argtypes = ctypes.c_size_t, [ctypes.c_int, ctypes.c_int64]
        self._chunk.restype = ctypes.c_size_t
        self._chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]

    @staticmethod
    def find() -> Path | None:
        """The CPU library of an installed wheel."""
        for wheel in WHEELS:
            try:
                files = importlib.metadata.files(wheel) or []
            except importlib.metadata.PackageNotFoundError:
                continue
            for file in files:
                if file.name.startswith("libggml-cpu") and ".so" in file.name:
                    return Path(str(file.locate()))
        return None

    def matrix(self, fmt: Format, rows: int, width: int, rng: np.random.Generator) -> NDArray[np.uint8]:
        """[rows, bytes of a row], quantized by the library."""
        sample = rng.standard_normal((SAMPLE_ROWS, width), dtype=np.float32)
        row_bytes = self._row_size(fmt.code, width)
        packed = np.empty((SAMPLE_ROWS, row_bytes), dtype=np.uint8)
        self._chunk(fmt.code, sample.ctypes.data, packed.ctypes.data, 0, SAMPLE_ROWS, width, None)
        return np.tile(packed, (-(-rows // SAMPLE_ROWS), 1))[:rows]

    def product(self, fmt: Format, matrix: NDArray[np.uint8], x: NDArray[np.float32]) -> Callable[[], None]:
        """matrix @ x for one row x, its quantization included.

        What Python has to prepare is done here, before any clock runs: made anew in each call it cost 20 microseconds
        an expert, an eighth of Q2_K's time at the small shape.
        """
        width = len(x)
        y, out = np.empty(width // fmt.block * fmt.block_bytes, dtype=np.uint8), np.empty(len(matrix), dtype=np.float32)
        quantize = getattr(self._cpu, fmt.quantize)
        row = ctypes.c_void_p(x.ctypes.data), ctypes.c_void_p(y.ctypes.data), ctypes.c_int64(width)
        dot = ctypes.cast(getattr(self._cpu, fmt.dot), ctypes.c_void_p).value
        assert dot is not None
        rows = dot, width, len(matrix), matrix.ctypes.data, matrix.strides[0], y.ctypes.data, out.ctypes.data
        buffers = matrix, x, y, out  # the numbers above are their addresses

        def run(_alive: object = buffers) -> None:
            quantize(*row)
            _cpu.dot_rows(*rows)

        return run
