# SPDX-License-Identifier: Apache-2.0
"""The Python reference itself, against the format's vectors: a reference that is wrong proves nothing."""
import glob
import json
import os

import exl3ref as ref
from harness import TESTS, check, equal

DEVICE = False


def vector(name):
    with open(os.path.join(TESTS, "vectors", name)) as f:
        return json.load(f)


class Draws:
    """splitmix64, 16 bits at a time, in the order that the vectors say."""

    def __init__(self, seed):
        self.state = seed

    def draw(self):
        mask = 2**64 - 1
        self.state = self.state + 0x9E3779B97F4A7C15 & mask
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & mask
        z = (z ^ z >> 27) * 0x94D049BB133111EB & mask
        return (z ^ z >> 31) >> 48

    def scales(self, count, s):
        out = []
        for _ in range(count):
            v = self.draw()
            out.append((512 + (v & 511)) / 1024 * s * (-1 if v & 0x8000 else 1))
        return out

    def x(self, count):
        return [((self.draw() >> 4) - 2048) / 1024 for _ in range(count)]

    def matrix(self, k, n, rate2, kind, bias=False):
        tensors, words = {}, 8 * rate2
        codes = [self.draw() for _ in range(k // 16 * (n // 16) * words)]
        tensors["m.trellis"] = ref.Tensor("I16", [k // 16, n // 16, words], b"".join(c.to_bytes(2, "little") for c in codes))
        for name, count, s in (("suh", k, 1 / 16), ("svh", n, 1.0)) + ((("bias", n, 1.0),) if bias else ()):
            tensors[f"m.{name}"] = Values(self.scales(count, s))
        for marker, value in ref.MARKERS.items():
            if value == kind:
                tensors[f"m.{marker}"] = None
        return ref.Matrix(tensors, "m")


class Values:
    def __init__(self, values):
        self.values = values

    def floats(self):
        return self.values


def test_tiles(env):
    for path in sorted(glob.glob(os.path.join(TESTS, "vectors", "tile_*bpw.json"))):
        v = vector(os.path.basename(path))
        words = [int(w, 16) for w in v["words_in_file_order_as_u16"].split()]
        rows = [0] * 256
        for i, kind in enumerate(ref.NAMES):
            if f"fp16_row_major_k_n_{kind}" not in v:
                continue
            for t, value in enumerate(ref.tile_values(words, int(2 * v["bits"]), i)):
                rows[16 * (t & 1 | t >> 2 & 6 | (t & 2) << 2) + (t >> 5 | (t & 4) << 1)] = value
            want = [ref.half(int(h, 16)) for h in v[f"fp16_row_major_k_n_{kind}"].split()]
            equal(rows, want, f"{os.path.basename(path)} {kind}")


def test_layers(env):
    for i in range(4):
        v = vector(f"linear_{i}.json")
        draws = Draws(v["splitmix64_seed"])
        m = draws.matrix(v["k"], v["n"], int(2 * v["bits"]), ref.NAMES.index(v["codebook"]), v["has_bias"])
        error = ref.relative_errors(m.apply(draws.x(v["k"])), v["y_double"])[0]
        check(error < 1e-9, f"linear_{i}: differs by {error:.2e}")


def test_experts(env):
    v = vector("moe_silu.json")
    draws = Draws(v["splitmix64_seed"])
    h, inter, kind = v["hidden"], v["intermediate"], ref.NAMES.index(v["codebook"])
    gu, down = int(2 * v["gate_up_bits"]), int(2 * v["down_bits"])
    experts = [[draws.matrix(h, inter, gu, kind), draws.matrix(h, inter, gu, kind), draws.matrix(inter, h, down, kind)]
               for _ in range(v["experts"])]
    x, y = draws.x(h), [0.0] * h
    for e, w in zip(v["selected"], v["weights"]):
        y = [a + w * b for a, b in zip(y, ref.mlp(*experts[e], x))]
    error = ref.relative_errors(y, v["y_double"])[0]
    check(error < 1e-9, f"moe_silu: differs by {error:.2e}")
