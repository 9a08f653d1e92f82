"""Small kernels of the device layer: their texts, inputs, and what they must give by independent computations.

Both bodies of the device layer are held to these: the plain C++ one in the emulator (tests/emulator), CUDA's on a card
(tests/gpu). A kernel takes two pointers: words to read, words to write.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jinja2
import numpy as np
import torch

FOLDER = Path(__file__).parent
TEMPLATES = FOLDER.parents[1] / "templates"
WORDS = np.uint32
GROUP = 128

#: Files that no architecture but sm_90a can have.
WGMMA_FILES = ("wgmma", "flow", "bugs")
#: By file: the includes that it needs, and the lowest compute capability that has what they wrap.
INCLUDES = {
    "any": (
        ("thread", "math", "convert_half2", "packed", "named_barrier", "atomic", "mma_s4", "mma_f16_f16"),
        80,
    ),
    "ada": (("thread", "math", "convert_half2", "mma_e4m3_f16"), 89),
    "hopper": (
        ("thread", "math", "shared_memory", "store_matrix", "named_barrier", "mbarrier", "bulk_copy",
         "dependent_launch"),
        90,
    ),
    "wgmma": (("thread", "math", "shared_memory", "bulk_copy", "wgmma", "register_budget"), 90),
    "flow": (
        ("thread", "math", "convert_e4m3", "shared_memory", "named_barrier", "mbarrier", "bulk_copy", "wgmma",
         "register_budget"),
        90,
    ),
    "bugs": (
        ("thread", "math", "shared_memory", "store_matrix", "named_barrier", "mbarrier", "bulk_copy",
         "dependent_launch", "atomic", "wgmma", "register_budget"),
        90,
    ),
}  # fmt: skip
S8_COLUMNS = (64, 96, 128, 192, 224, 256)
PRODUCTS = (
    *(("s8_ss", n) for n in S8_COLUMNS),
    *(("e4m3_rs", n) for n in (64, 128, 136)),
    *(("e4m3_ss", n) for n in (64, 128)),
)


def read_source(name: str, target: str) -> str:
    """The text of one file with the device layer's bodies for `target` between its marker lines."""
    text = (FOLDER / f"{name}.cu").read_text()
    includes, _ = INCLUDES[name]
    cuda = _layer(includes, "cuda")
    if target == "cuda":
        return f"#include <cstdint>\n// ---- device layer: begin (cuda) ----\n{cuda}{_END}{text}"
    host = _layer(("emulator", "emulator_hopper", *includes), "host")
    begin = '#include <cstdint>\n// ---- device layer: begin (host) ----\n#line 1 "device_layer"\n'
    return f'{begin}{host}#line {3 + cuda.count(chr(10))} "{name}.cu"\n{_END}{text}'


_END = "// ---- device layer: end ----\n"


def _layer(names: tuple[str, ...], target: str) -> str:
    return "\n".join(_read_include(TEMPLATES / "include" / target / name) for name in names) + "\n"


def _read_include(path: Path) -> str:
    if (plain := path.with_name(f"{path.name}.cuh")).exists():
        return plain.read_text()
    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(path.with_name(f"{path.name}.cuh.j2").read_text()).render(wgmma_products=PRODUCTS)


@dataclass(frozen=True)
class Case:
    """Launches of kernels that read `input` and write words.

    Attributes:
        file: of INCLUDES.
        kernels: launched in order, each with `blocks` blocks of `threads` threads.
        expected: the words that an independent computation gives.
        tolerance: largest difference from `expected` as a share of `scale`; 0: bit for bit.
        types: what the words hold, by turns: "word", or numbers, of which all NaNs count as equal.
    """

    name: str
    file: str
    kernels: tuple[str, ...]
    input: np.ndarray
    expected: np.ndarray
    blocks: int = 1
    threads: int = GROUP
    smem_bytes: int = 0
    tolerance: float = 0.0
    scale: np.ndarray | float = 1.0
    types: tuple[str, ...] = ("word",)

    @property
    def architecture(self) -> int:
        return INCLUDES[self.file][1]

    def difference(self, output: np.ndarray, reference: np.ndarray | None = None) -> float:
        """How far words are from `reference` (None: what is expected), as a share of `scale`; inf for NaN or not."""
        wanted = self.expected if reference is None else reference
        assert output.shape == wanted.shape
        return max(
            _distance(output[i :: len(self.types)], wanted[i :: len(self.types)], kind, self.scale)
            for i, kind in enumerate(self.types)
        )


def _distance(got: np.ndarray, wanted: np.ndarray, kind: str, scale: np.ndarray | float) -> float:
    got, wanted = (_NUMBERS[kind](np.ascontiguousarray(words)) for words in (got, wanted))
    if not np.array_equal(np.isnan(got), np.isnan(wanted)):
        return float("inf")
    same = (got == wanted) | np.isnan(got)
    with np.errstate(invalid="ignore"):
        return float(np.where(same, 0.0, np.abs(got - wanted) / scale).max())


def from_e4m3(bits: np.ndarray) -> np.ndarray:
    return torch.from_numpy(np.ascontiguousarray(bits)).view(torch.float8_e4m3fn).to(torch.float64).numpy()


_NUMBERS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "word": lambda words: words.astype(np.float64),
    "float": lambda words: words.view(np.float32).astype(np.float64),
    "half": lambda words: words.view(np.float16).astype(np.float64),
    "e4m3": lambda words: from_e4m3(words.view(np.uint8)),
}


def _rng(name: str) -> np.random.Generator:
    return np.random.default_rng(zlib.crc32(name.encode()))


CASES: dict[str, Callable[[], Case]] = {}


def case(make: Callable[[], Case]) -> Callable[[], Case]:
    """Register a function that makes a case, under its own name."""
    CASES[make.__name__] = make
    return make


# ---- one warp's matrix products: fragments as PTX lays them out ----


def _bytes_of(rows: np.ndarray, bits: int) -> np.ndarray:
    """[rows, k] numbers of 4, 8 or 16 bits as [rows, k * bits / 8] bytes."""
    if bits == 4:
        low, high = rows[:, ::2] & 15, rows[:, 1::2] & 15
        return (low | high << 4).astype(np.uint8)
    return np.ascontiguousarray(rows).view(np.uint8)


def _fragments(a: np.ndarray, b: np.ndarray, c: np.ndarray, bits: int) -> np.ndarray:
    """The registers of 32 lanes: A [16, k], B [8, k] (its columns as rows), C [16, 8]; words [32, 6 + C's]."""
    a_bytes, b_bytes = _bytes_of(a, bits), _bytes_of(b, bits)
    lanes = []
    for lane in range(32):
        group, quad = lane // 4, lane % 4
        at = [slice(4 * quad, 4 * quad + 4), slice(16 + 4 * quad, 20 + 4 * quad)]
        words = [a_bytes[group, at[0]], a_bytes[group + 8, at[0]], a_bytes[group, at[1]], a_bytes[group + 8, at[1]]]
        words += [b_bytes[group, at[0]], b_bytes[group, at[1]]]
        pairs = [np.ascontiguousarray(c[group + 8 * half, 2 * quad : 2 * quad + 2]).view(np.uint8) for half in (0, 1)]
        lanes.append(np.concatenate([*words, *pairs]).view(WORDS))
    return np.stack(lanes)


def _tile_words(d: np.ndarray) -> np.ndarray:
    """D [16, 8] as the lanes' words."""
    pairs = [d[lane // 4 + 8 * half, 2 * (lane % 4) : 2 * (lane % 4) + 2] for lane in range(32) for half in (0, 1)]
    return np.concatenate(pairs).view(WORDS)


@case
def mma_s4() -> Case:
    rng = _rng("mma_s4")
    a, b = (rng.integers(-8, 8, (rows, 64)) for rows in (16, 8))
    c = rng.integers(-(2**31), 2**31, (16, 8))
    c[0, :2] = 2**31 - 1, -(2**31)
    d = (a @ b.T + c).astype(np.int64).astype(np.int32)  # wraps
    words = _fragments(a, b, c.astype(np.int32), 4)
    return Case("mma_s4", "any", ("mma_s4_kernel",), words, _tile_words(d), threads=32)


def _sum_scale(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """What rounding errors of a sum are a share of: the sum of magnitudes, in the lanes' order."""
    sizes = np.abs(a.astype(np.float64)) @ np.abs(b.astype(np.float64)).T + np.abs(c.astype(np.float64))
    pairs = [sizes[lane // 4 + 8 * half, 2 * (lane % 4) : 2 * (lane % 4) + 2] for lane in range(32) for half in (0, 1)]
    return np.concatenate(pairs)


@case
def mma_f16_f16() -> Case:
    rng = _rng("mma_f16_f16")
    a, b, c = (rng.normal(size=shape).astype(np.float16) for shape in ((16, 16), (8, 16), (16, 8)))
    d = (a.astype(np.float64) @ b.T.astype(np.float64) + c).astype(np.float16)
    return Case(
        "mma_f16_f16", "any", ("mma_f16_f16_kernel",), _fragments(a, b, c, 16), _tile_words(d), threads=32,
        tolerance=2.0**-10, scale=_sum_scale(a, b, c), types=("half",),
    )  # fmt: skip


def to_e4m3(x: np.ndarray) -> np.ndarray:
    """Bytes of the nearest e4m3 numbers, beyond +-448 saturated."""
    clamped = torch.from_numpy(np.asarray(x, np.float32)).clamp(-448, 448)
    return clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@case
def mma_e4m3_f16() -> Case:
    rng = _rng("mma_e4m3_f16")
    a, b = (to_e4m3(rng.normal(size=(rows, 32))) for rows in (16, 8))
    c = rng.normal(size=(16, 8)).astype(np.float16)
    d = (from_e4m3(a) @ from_e4m3(b).T + c).astype(np.float16)
    return Case(
        "mma_e4m3_f16", "ada", ("mma_e4m3_f16_kernel",), _fragments(a, b, c, 8), _tile_words(d), threads=32,
        tolerance=2.0**-9, scale=_sum_scale(from_e4m3(a), from_e4m3(b), c), types=("half",),
    )  # fmt: skip


# ---- conversions and packed arithmetic ----


def _special_floats(rng: np.random.Generator, count: int) -> np.ndarray:
    """Normal, huge and tiny numbers, ties, infinities and NaN."""
    wide = rng.normal(size=count) * 2.0 ** rng.integers(-30, 20, count)
    some = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65519.0, 65520.0, 2.0**-24, 2.0**-25, 1.5 * 2.0**-24, 448.0]
    wide[: len(some)] = some
    return wide.astype(np.float32)


@case
def convert_half2() -> Case:
    rng = _rng("convert_half2")
    floats = _special_floats(rng, 256).reshape(128, 2)
    numbers = np.concatenate([_special_floats(rng, 128).clip(-65504, 65504), rng.normal(size=384)])
    halves = rng.permutation(numbers.astype(np.float16)).reshape(128, 4)
    with np.errstate(over="ignore", invalid="ignore"):
        packed = floats.astype(np.float16).view(np.uint32)
        x, y = floats[:, :1], floats[:, 1:]
        sums = np.concatenate([x, y, y, x], 1) + halves.astype(np.float32)
    words = np.concatenate([floats.view(WORDS), halves.view(WORDS)], 1)
    expected = np.concatenate(
        [packed, halves[:, :2].astype(np.float32).view(WORDS), sums.view(WORDS), np.zeros((128, 1), WORDS)], 1
    )
    types = ("half", *6 * ("float",), "word")
    return Case("convert_half2", "any", ("convert_half2_kernel",), words, expected.reshape(-1), types=types)


@case
def packed() -> Case:
    rng = _rng("packed")
    words = rng.integers(0, 2**32, (256, 3), dtype=WORDS)
    halves = rng.normal(size=(64, 6)) * 2.0 ** rng.integers(-8, 8, (64, 6))
    words[:64] = halves.astype(np.float16).view(WORDS)  # the rest has every kind of number
    signed = words.view(np.int16).reshape(256, 3, 2)
    bytes_ = np.concatenate([words[:, :1].view(np.uint8), words[:, 1:2].view(np.uint8)], 1)
    permuted = [np.ascontiguousarray(bytes_[:, order]).view(WORDS) for order in ([1, 2, 5, 6], [0, 2, 4, 6])]
    largest = np.max(words.view(np.int32), axis=1).view(WORDS)[:, None]
    wrapped = (signed[:, 0].astype(np.int32) + signed[:, 1]).astype(np.int16)
    numbers = words.view(np.float16).reshape(256, 3, 2).astype(np.float64)
    with np.errstate(all="ignore"):
        fused = (numbers[:, 0] * numbers[:, 1] + numbers[:, 2]).astype(np.float16)
        added = (numbers[:, 0] + numbers[:, 1]).astype(np.float16)
        maxima = np.fmax(numbers[:, 0], numbers[:, 1]).astype(np.float16)
    columns = [
        *permuted, largest, np.ascontiguousarray(signed.max(1)).view(WORDS),
        np.maximum(wrapped, signed[:, 2]).view(WORDS), fused.view(WORDS), added.view(WORDS), maxima.view(WORDS),
    ]  # fmt: skip
    return Case(
        "packed", "any", ("packed_kernel",), words, np.concatenate(columns, 1).reshape(-1), threads=256,
        types=(*5 * ("word",), *3 * ("half",)),
    )  # fmt: skip


@case
def e4m3_half2() -> Case:
    halves = np.arange(65536, dtype=np.uint16).view(np.float16)  # every fp16 number there is
    bits = to_e4m3(halves.astype(np.float32)).reshape(-1, 4)
    back = from_e4m3(bits).astype(np.float16).view(WORDS)
    expected = np.concatenate([bits.view(WORDS), back], 1)
    return Case(
        "e4m3_half2", "ada", ("e4m3_half2_kernel",), halves.view(WORDS), expected.reshape(-1), blocks=64, threads=256,
        types=("e4m3", "half", "half"),
    )  # fmt: skip


# ---- memory, barriers, launches ----


@case
def named_barrier() -> Case:
    words = _rng("named_barrier").integers(0, 2**31, 64, dtype=WORDS)
    neighbours = (words + 1).reshape(-1, 2)[:, ::-1].reshape(-1)
    return Case("named_barrier", "any", ("named_barrier_kernel",), words, np.concatenate([words[::-1], neighbours]))


@case
def atomic() -> Case:
    rng = _rng("atomic")
    words = rng.integers(0, 2**32, (9, 64), dtype=WORDS)
    words[:, 32:] = np.abs(rng.normal(size=(9, 32)).astype(np.float32)).view(WORDS)
    words[4, 40] = np.float32(np.inf).view(WORDS)
    sums = words.astype(np.uint64).sum(0).astype(WORDS)
    sums[0] = 9
    expected = np.concatenate([sums[:32], words[:, 32:].view(np.float32).max(0).view(WORDS)])
    return Case("atomic", "any", ("zero_kernel", "atomic_kernel"), words, expected, blocks=9, threads=64)


@case
def store_matrix() -> Case:
    words = _rng("store_matrix").integers(0, 2**32, (32, 4), dtype=WORDS)
    fragments = words.view(np.uint16).reshape(8, 4, 4, 2)  # row, quad, matrix, neighbour
    plain = fragments.transpose(2, 0, 1, 3).reshape(4, 8, 8)
    expected = np.stack([plain, plain.transpose(0, 2, 1)])
    return Case("store_matrix", "hopper", ("store_matrix_kernel",), words, _words(expected), threads=32)


@case
def pipeline() -> Case:
    words = _rng("pipeline").integers(0, 2**32, (3, 7, 1024), dtype=WORDS)
    return Case("pipeline", "hopper", ("pipeline_kernel",), words, _words(words.sum(1, dtype=WORDS)), 3, GROUP + 32)


@case
def dependent_launch() -> Case:
    words = _rng("dependent_launch").integers(0, 2**30, 64, dtype=WORDS)
    return Case("dependent_launch", "hopper", ("first_kernel", "second_kernel"), words, 2 * words + 1, threads=64)


@case
def registers() -> Case:
    words = _rng("registers").integers(0, 2**30, 3 * GROUP, dtype=WORDS)
    expected = words + np.repeat(np.array([1, 2, 2], WORDS), GROUP)
    return Case("registers", "wgmma", ("registers_kernel",), words, expected, threads=3 * GROUP)


def _words(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(WORDS)


# ---- a warpgroup's matrix products ----


def _swizzle(rows: np.ndarray) -> np.ndarray:
    """[rows, 32, 64 or 128] bytes as wgmma's shared-memory image: 16-byte chunks exclusive-ored with the row."""
    count, width = rows.shape
    chunks = np.ascontiguousarray(rows).reshape(count, width // 16, 16)
    phase = np.arange(count) // (128 // width) % (width // 16)
    order = np.arange(width // 16)[None, :] ^ phase[:, None]
    return np.take_along_axis(chunks, order[:, :, None], axis=1).reshape(count, width)


def _group_input(a: np.ndarray, b: np.ndarray, c: np.ndarray, *, a_is_swizzled: bool = True) -> np.ndarray:
    a_image = _swizzle(a) if a_is_swizzled else a
    return np.concatenate([_words(a_image.view(np.uint8)), _words(_swizzle(b.view(np.uint8))), _words(c)])


def _make_s8(columns: int, row_bytes: int) -> Callable[[], Case]:
    def make() -> Case:
        name = f"s8_{columns}_{row_bytes}"
        rng = _rng(name)
        a, b = (rng.integers(-128, 128, (rows, row_bytes)).astype(np.int8) for rows in (64, columns))
        c = rng.integers(-(2**31), 2**31, (64, columns)).astype(np.int32)
        d = c.astype(np.int64) + 2 * (a.astype(np.int64) @ b.T.astype(np.int64))
        words = _group_input(a.view(np.uint8), b, c)
        return Case(name, "wgmma", (name,), words, _words(d.astype(np.int32)), smem_bytes=8192 + columns * row_bytes)

    return make


for _columns in S8_COLUMNS:
    CASES[f"wgmma_s8_{_columns}_128"] = _make_s8(_columns, 128)
for _row_bytes in (64, 32):
    CASES[f"wgmma_s8_128_{_row_bytes}"] = _make_s8(128, _row_bytes)


def draw_e4m3(rng: np.random.Generator, blocks: int, columns: int, depth: int, spread: int) -> tuple[np.ndarray, ...]:
    """A [blocks, 64, depth] and B [blocks, columns, depth] of e4m3 and an accumulator [blocks, 64, columns].

    Args:
        spread: products and accumulator differ by up to 2^spread, by a random amount each.
    """

    def scaled(*shape: int) -> np.ndarray:
        return rng.normal(size=shape) * 2.0 ** rng.integers(-spread, 1, shape)

    a, b = to_e4m3(scaled(blocks, 64, depth)), to_e4m3(scaled(blocks, columns, depth))
    return a, b, cut_to_fp22(scaled(blocks, 64, columns)).astype(np.float32)


def cut_to_fp22(x: np.ndarray) -> np.ndarray:
    """Toward zero to 13 mantissa bits, as float64."""
    bits = np.asarray(x, np.float64).view(np.uint64) & ~np.uint64((1 << 39) - 1)
    return bits.view(np.float64)


def exponents_of_e4m3(bits: np.ndarray) -> np.ndarray:
    """Of the format's numbers, -6 for subnormal ones; very small for zero."""
    field = (bits >> 3 & 15).astype(np.int64)
    return np.where(bits & 127, np.maximum(field, 1) - 7, -1000)


def fp22_sums(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """C + A B^T as the FP8 tensor core does it, 32 columns of A and B at a time; float32 [..., rows of A, rows of B].

    All 33 addends are cut toward zero to 13 bits below the largest exponent, a product's being the sum of its factors';
    their sum is cut to 13 mantissa bits. An H200 gave these very bits.
    """
    sums = c.astype(np.float64)
    for k in range(0, a.shape[-1], 32):
        left, right = (x[..., k : k + 32] for x in (a, b))
        exponents = exponents_of_e4m3(left)[..., :, None, :] + exponents_of_e4m3(right)[..., None, :, :]
        top = np.maximum(exponents.max(-1), np.where(sums == 0, -1000, np.frexp(sums)[1] - 1))
        unit = np.ldexp(1.0, top - 13)
        products = from_e4m3(left)[..., :, None, :] * from_e4m3(right)[..., None, :, :]
        sums = cut_to_fp22((np.trunc(products / unit[..., None]).sum(-1) + np.trunc(sums / unit)) * unit)
    return sums.astype(np.float32)


def _make_e4m3(form: str, columns: int, depth: int, accumulates: bool) -> Callable[[], Case]:
    def make() -> Case:
        name = f"e4m3_{form}_{columns}"
        a, b, c = draw_e4m3(_rng(name), 2, columns, depth, spread=2)
        words = [_group_input(*one, a_is_swizzled=form == "ss") for one in zip(a, b, c, strict=True)]
        before = c if accumulates else np.zeros_like(c)
        return Case(
            name, "wgmma", (name,), np.concatenate(words), _words(fp22_sums(a, b, before)), blocks=2,
            smem_bytes=8192 + columns * depth, types=("float",),
        )  # fmt: skip

    return make


def make_probe(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> Case:
    """One product a block: A [blocks, 64, 32], B [blocks, 64, 32] of e4m3, C [blocks, 64, 64] of FP22 numbers."""
    words = [_group_input(*one) for one in zip(a, b, c, strict=True)]
    return Case(
        "e4m3_probe", "wgmma", ("e4m3_probe",), np.concatenate(words), _words(fp22_sums(a, b, c)), blocks=len(a),
        smem_bytes=8192 + 64 * 32, types=("float",),
    )  # fmt: skip


@case
def wgmma_e4m3_probe() -> Case:
    return make_probe(*draw_e4m3(_rng("wgmma_e4m3_probe"), 4, 64, 32, spread=4))


CASES["wgmma_e4m3_rs_64"] = _make_e4m3("rs", 64, 128, True)
CASES["wgmma_e4m3_rs_128"] = _make_e4m3("rs", 128, 64, False)
CASES["wgmma_e4m3_rs_136"] = _make_e4m3("rs", 136, 128, True)
CASES["wgmma_e4m3_ss_64"] = _make_e4m3("ss", 64, 128, False)
CASES["wgmma_e4m3_ss_128"] = _make_e4m3("ss", 128, 128, True)


@case
def flow() -> Case:
    """Five tiles of 64 keys, two consumers of 64 queries, 64 channels."""
    rng = _rng("flow")
    q, k = (rng.integers(-128, 128, (rows, 64)).astype(np.int8) for rows in (128, 320))
    v = to_e4m3(rng.normal(size=(64, 320)))  # [channels, keys]
    scores = (q.astype(np.int32) @ k.T.astype(np.int32)).astype(np.float32)
    out = fp22_sums(to_e4m3(scores / 256)[None], v[None], np.zeros((1, 128, 64), np.float32))
    place = np.arange(32)  # of a key among 32 in V, where the scores' registers have them
    token = 8 * (place // 16 * 2 + place % 4 // 2) + 2 * (place // 4 % 4) + place % 2
    order = (np.arange(320) // 32 * 32).reshape(-1, 32) + token
    stored = v[:, order.reshape(-1)]
    images = [_swizzle(part) for part in q.view(np.uint8).reshape(2, 64, 64)]
    for first in range(0, 320, 64):
        images += [_swizzle(k[first : first + 64].view(np.uint8)), _swizzle(stored[:, first : first + 64])]
    return Case(
        "flow", "flow", ("flow_kernel",), _words(np.stack(images)), _words(out), threads=3 * GROUP,
        smem_bytes=6 * 4096 + 2 * 64 * 64 * 4, types=("float",),
    )  # fmt: skip


@case
def wgmma_element() -> Case:
    a, b, _ = draw_e4m3(_rng("wgmma_element"), 1, 64, 32, spread=0)
    zero = np.zeros((1, 64, 64), np.float32)
    once = fp22_sums(a, b, zero)
    twice = fp22_sums(a, b, once)
    threads = np.arange(GROUP)
    at = (0, threads // 32 * 16 + threads % 32 // 4, 2 * (threads % 4))
    beside = (0, at[1], at[2] + 1)
    expected = np.concatenate([once[beside], once[at], twice[beside]])
    words = np.concatenate([_words(a), _words(_swizzle(b[0]))])
    return Case(
        "wgmma_element", "wgmma", ("element_kernel",), words, _words(expected), smem_bytes=64 * 32,
        types=("float",),
    )  # fmt: skip
