# SPDX-License-Identifier: Apache-2.0
"""exl3ref.py - the EXL3 format and its layers in plain Python: a second, independent implementation.

Written from the format's description only; shares nothing with kernels/. Slow and obvious.
"""
import ast
import json
import math
import struct

MARKERS = {"mcg": 1, "mul1": 2}
NAMES = ["3inst", "mcg", "mul1"]


def half(bits):
    return struct.unpack("<e", struct.pack("<H", bits))[0]


def round_half(value):
    """Nearest fp16, ties to even."""
    return struct.unpack("<e", struct.pack("<e", value))[0]


def bf16(bits):
    return struct.unpack("<f", struct.pack("<I", bits << 16))[0]


def to_bf16(value):
    """Bits of the nearest bf16, ties to even; finite values only."""
    bits = struct.unpack("<I", struct.pack("<f", value))[0]
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def e4m3(byte):
    sign = -1.0 if byte & 0x80 else 1.0
    e, m = byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return math.nan
    return sign * (m * 2.0**-9 if e == 0 else (8 + m) * 2.0 ** (e - 10))


def codebook(kind):
    """The 65536 values of a codebook."""
    values = []
    for w in range(65536):
        if kind == 2:
            x = w * 0x83DCD12D & 0xFFFFFFFF
            s = (x & 255) + (x >> 8 & 255) + (x >> 16 & 255) + (x >> 24)
            values.append(round_half((1774 * s - 905216) / 2**18))
        else:
            x = w * 89226354 + 64248484 if kind == 0 else w * 0xCBAC1FED
            x = (x & 0x8FFF8FFF) ^ 0x3B603B60
            values.append(round_half(half(x & 0xFFFF) + half(x >> 16)))
    return values


_codebooks = {}


def tile_values(words, rate2, kind):
    """256 weights of a tile in trellis order; words: its u16 words in file order."""
    if kind not in _codebooks:
        _codebooks[kind] = codebook(kind)
    table = _codebooks[kind]
    bits = 128 * rate2
    ring = 0
    for i in range(0, len(words), 2):  # big-endian inside 32 bits: the second half comes first
        ring = ring << 32 | words[i + 1] << 16 | words[i]
    ring |= (ring & 0xFFFF) << bits  # the last 16 bits once more in front of the first
    out = []
    for t in range(256):
        end = (t + 1) * (rate2 // 2) + (rate2 & 1) * ((t + 1) // 2)
        out.append(table[ring >> (bits - end) & 0xFFFF])
    return out


def hadamard(v):
    """In place, blocks of 128, orthonormal."""
    for base in range(0, len(v), 128):
        step = 1
        while step < 128:
            for i in range(base, base + 128):
                if not i & step:
                    a, b = v[i], v[i + step]
                    v[i], v[i + step] = a + b, a - b
            step *= 2
        for i in range(base, base + 128):
            v[i] *= 0.08838834764831845


class Matrix:
    """A quantized matrix with its inner weights as rows of floats."""

    def __init__(self, tensors, name, k=None, n=None):
        trellis = tensors[name + ".trellis"]
        tiles_k, tiles_n, words = trellis.shape
        self.k, self.n, self.rate2 = 16 * tiles_k, 16 * tiles_n, words // 8
        self.k_log, self.n_log = k or self.k, n or self.n
        kinds = [kind for marker, kind in MARKERS.items() if f"{name}.{marker}" in tensors]
        self.kind = kinds[0] if kinds else 0
        self.suh = tensors[name + ".suh"].floats()
        self.svh = tensors[name + ".svh"].floats()
        self.bias = tensors[name + ".bias"].floats() if name + ".bias" in tensors else None
        data = struct.unpack(f"<{tiles_k * tiles_n * words}H", trellis.data)
        self.rows = [[0.0] * self.n for _ in range(self.k)]
        for a in range(tiles_k):
            for b in range(tiles_n):
                at = (a * tiles_n + b) * words
                values = tile_values(data[at:at + words], self.rate2, self.kind)
                for t, value in enumerate(values):
                    row = t & 1 | t >> 2 & 6 | (t & 2) << 2
                    col = t >> 5 | (t & 4) << 1
                    self.rows[16 * a + row][16 * b + col] = value

    def apply(self, x):
        """y of one row; x has k_log elements, y n_log."""
        v = [a * s for a, s in zip(list(x) + [0.0] * (self.k - len(x)), self.suh)]
        hadamard(v)
        y = [0.0] * self.n
        for a, row in zip(v, self.rows):
            y = [s + a * w for s, w in zip(y, row)]
        hadamard(y)
        y = [a * s for a, s in zip(y, self.svh)]
        if self.bias:
            y = [a + b for a, b in zip(y, self.bias)]
        return y[:self.n_log]


def act(name, g, u, limit=0.0):
    if name == "relu2":
        return max(u, 0.0) ** 2
    if name == "swiglu_oai":
        if limit:
            g, u = min(g, limit), max(-limit, min(u, limit))
        return g / (1 + math.exp(-1.702 * g)) * (u + 1)
    if name == "silu":
        a = g / (1 + math.exp(-g))
    elif name == "gelu":
        a = 0.5 * g * (1 + math.tanh(0.7978845608028654 * (g + 0.044715 * g**3)))
    else:
        a = max(g, 0.0) ** 2
    if limit:
        a, u = min(a, limit), max(-limit, min(u, limit))
    return a * u


def mlp(gate, up, down, x, name="silu", limit=0.0):
    u = up.apply(x)
    g = gate.apply(x) if gate else u
    return down.apply([act(name, a, b, limit) for a, b in zip(g, u)])


def mla(q, cache, indices, scale, value_dim):
    """One query: q [heads][dim], cache [slots][dim]; o [heads][value_dim] and lse [heads]."""
    rows = [cache[i] for i in indices if 0 <= i < len(cache)]
    out, lse = [], []
    for head in q:
        scores = [scale * sum(a * b for a, b in zip(head, row)) for row in rows]
        if not scores:
            out.append([0.0] * value_dim)
            lse.append(-math.inf)
            continue
        top = max(scores)
        p = [math.exp(s - top) for s in scores]
        total = sum(p)
        out.append([sum(w * row[d] for w, row in zip(p, rows)) / total for d in range(value_dim)])
        lse.append(top + math.log(total))
    return out, lse


class Tensor:
    def __init__(self, dtype, shape, data):
        self.dtype, self.shape, self.data = dtype, shape, data

    def floats(self):
        count = math.prod(self.shape)
        if self.dtype == "BF16":
            return [bf16(b) for b in struct.unpack(f"<{count}H", self.data)]
        return list(struct.unpack(f"<{count}" + {"F16": "e", "F32": "f"}[self.dtype], self.data))


def load(*paths):
    """All tensors of some safetensors files by name."""
    tensors = {}
    for path in paths:
        with open(path, "rb") as f:
            blob = f.read()
        size = struct.unpack("<Q", blob[:8])[0]
        for name, info in json.loads(blob[8:8 + size]).items():
            if name != "__metadata__":
                begin, end = info["data_offsets"]
                tensors[name] = Tensor(info["dtype"], info["shape"], blob[8 + size + begin:8 + size + end])
    return tensors


def save(path, tensors, holes=None):
    """Writes name -> Tensor. No padding, as the genuine writer does it. holes: name -> (dtype, shape) of tensors of
    zeros behind them, which take no space on the disk; 16-bit types."""
    header, at = {}, 0
    for name, t in tensors.items():
        header[name] = {"dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + len(t.data)]}
        at += len(t.data)
    for name, (dtype, shape) in (holes or {}).items():
        end = at + 2 * math.prod(shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, end]}
        at = end
    text = json.dumps(header).encode()
    with open(path, "wb") as f:
        f.write(struct.pack("<Q", len(text)) + text)
        f.writelines(t.data for t in tensors.values())
        f.truncate(8 + len(text) + at)


# ---- NumPy files, as far as exl3ctl uses them ----

DESCR = {"<f2": "e", "<f4": "f", "<f8": "d", "<u2": "H", "<i4": "i", "<i8": "q", "|u1": "B"}


def npy_bytes(descr, shape, values, fortran=False, version=1):
    """values in the order of the file: column-major with fortran."""
    text = f"{{'descr': '{descr}', 'fortran_order': {fortran}, 'shape': {tuple(shape)!r}, }}"
    prefix = 10 if version == 1 else 12
    text += " " * (-(prefix + len(text) + 1) % 64) + "\n"
    head = b"\x93NUMPY" + bytes([version, 0])
    head += struct.pack("<H" if version == 1 else "<I", len(text)) + text.encode()
    return head + struct.pack(f"<{len(values)}{DESCR[descr]}", *values)


def npy_save(path, descr, shape, values, fortran=False, version=1):
    with open(path, "wb") as f:
        f.write(npy_bytes(descr, shape, values, fortran, version))


def npy_load(path):
    """(descr, shape, flat list in C order) of a file that our own program wrote."""
    with open(path, "rb") as f:
        blob = f.read()
    if blob[:6] != b"\x93NUMPY":
        raise ValueError(f"{path}: not a NumPy file")
    wide = blob[6] > 1
    start = 12 if wide else 10
    size = struct.unpack("<I" if wide else "<H", blob[8:start])[0]
    info = ast.literal_eval(blob[start:start + size].decode().strip())
    if info["fortran_order"]:
        raise ValueError(f"{path}: column-major")
    count = math.prod(info["shape"])
    return info["descr"], info["shape"], list(struct.unpack(f"<{count}{DESCR[info['descr']]}", blob[start + size:]))


def rows_of(flat, width):
    return [flat[i:i + width] for i in range(0, len(flat), width)]


def relative_errors(got, want):
    """Largest and rms difference, both over the rms of want."""
    if len(got) != len(want):
        return math.inf, math.inf
    rms = math.sqrt(sum(w * w for w in want) / len(want)) or 1.0
    diffs = [abs(g - w) for g, w in zip(got, want)]
    if any(math.isnan(d) for d in diffs):
        return math.inf, math.inf
    return max(diffs) / rms, math.sqrt(sum(d * d for d in diffs) / len(diffs)) / rms
