# SPDX-License-Identifier: Apache-2.0
"""MoE, MLP and MLA through exl3ctl against the independent reference."""
import math
import struct

import exl3ref as ref
from harness import check, equal
from test_linear import near, wave

BLOCK = "model.layers.2.mlp"


def deepseek(env):
    folder = env.model("tiny-deepseek")
    return ref.load(*(f"{folder}/model-0000{i}-of-00002.safetensors" for i in (1, 2)))


class Experts:
    """Matrices of a routed block, decoded when they are first met."""

    def __init__(self, tensors, prefix):
        self.tensors, self.prefix, self.known = tensors, prefix, {}

    def __call__(self, e):
        if e not in self.known:
            self.known[e] = [ref.Matrix(self.tensors, f"{self.prefix}.experts.{e}.{p}_proj")
                             for p in ("gate", "up", "down")]
        return self.known[e]


def routed(experts, x, ids, weights, act="silu", limit=0.0):
    y = [0.0] * 256
    for e, w in zip(ids, weights):
        if 0 <= e < 16:
            y = [a + w * b for a, b in zip(y, ref.mlp(*experts(e), x, act, limit))]
    return y


def run_moe(env, d, *args, model="tiny-deepseek"):
    out = env.path("y.npy")
    rc, _, err = d.ctl("run", "moe", model, BLOCK, env.path("x.npy"), "--ids", env.path("ids.npy"),
                       "--weights", env.path("w.npy"), "-o", out, *args)
    equal(rc, 0, f"run moe {args} ({err.strip()})")
    return ref.npy_load(out), err


def test_moe_routing(env):
    """Holes, repeated experts, invalid ids, both id types, all weight types."""
    d, experts = env.shared(), Experts(deepseek(env), BLOCK)
    x = wave(4 * 256, 6)
    ids = [[8, 6, 13, 15], [3, -1, 3, -1], [-1, -1, -1, -1], [2, 9, 16, -7]]
    weights = [[0.5, 0.25, 0.5, 0.25], [0.75, 9.0, 0.5, 9.0], [1.0, 1.0, 1.0, 1.0], [1.5, -0.5, 3.0, 3.0]]
    want = [v for r, i, w in zip(ref.rows_of(x, 256), ids, weights) for v in routed(experts, r, i, w)]
    flat_ids, flat_weights = sum(ids, []), sum(weights, [])
    ref.npy_save(env.path("x.npy"), "<f4", (4, 256), x)
    for ids_descr in ("<i4", "<i8"):
        for weights_descr in ("<f4", "<f2", "<u2"):  # each holds these weights exactly
            stored = [ref.to_bf16(w) for w in flat_weights] if weights_descr == "<u2" else flat_weights
            ref.npy_save(env.path("ids.npy"), ids_descr, (4, 4), flat_ids)
            ref.npy_save(env.path("w.npy"), weights_descr, (4, 4), stored)
            (descr, shape, y), said = run_moe(env, d, *(["--bf16"] if weights_descr == "<u2" else []))
            equal((descr, shape), ("<f4", (4, 256)), "y")
            check("2 invalid" in said, f"two invalid ids are not reported: {said}")
            near(y, want, "f4", f"ids {ids_descr}, weights {weights_descr}", chain=2)
            check(not any(y[512:768]), "a row of holes is not zero")


def test_moe_activations(env):
    d, experts = env.shared(), Experts(deepseek(env), BLOCK)
    x = [4 * v for v in wave(256, 7)]
    ids, weights = [1, 14, 6, 7], [0.5, 0.5, 0.25, 0.25]
    ref.npy_save(env.path("x.npy"), "<f4", (1, 256), x)
    ref.npy_save(env.path("ids.npy"), "<i4", (1, 4), ids)
    ref.npy_save(env.path("w.npy"), "<f4", (1, 4), weights)
    for act in ("silu", "gelu", "relu2_gated", "relu2", "swiglu_oai"):
        for limit in (0.0, 0.25):
            if limit and act.startswith("relu2"):
                continue  # a limit is defined for the others only
            args = ["--act", act] + (["--limit", str(limit)] if limit else [])
            (_, _, y), _ = run_moe(env, d, *args)
            near(y, routed(experts, x, ids, weights, act, limit), "f4", f"{act}, limit {limit}", chain=2)
    (_, _, y), _ = run_moe(env, d, "--routed-scale", "2.5")
    near(y, [2.5 * v for v in routed(experts, x, ids, weights)], "f4", "--routed-scale", chain=2)


def test_mlp(env):
    d, tensors = env.shared(), deepseek(env)
    x = [ref.bf16(ref.to_bf16(ref.round_half(v))) for v in wave(3 * 256, 8)]  # exact in all three types
    ref.npy_save(env.path("x.npy"), "<f4", (3, 256), x)
    ref.npy_save(env.path("x2.npy"), "<f2", (3, 256), x)
    ref.npy_save(env.path("xb.npy"), "<u2", (3, 256), [ref.to_bf16(v) for v in x])
    rows = ref.rows_of(x, 256)
    for prefix in ("model.layers.0.mlp", "model.layers.1.mlp.shared_experts"):
        parts = [ref.Matrix(tensors, f"{prefix}.{p}_proj") for p in ("gate", "up", "down")]
        d.ctl_ok("run", "mlp", "tiny-deepseek", prefix, env.path("x.npy"), "-o", env.path("y.npy"))
        _, shape, y = ref.npy_load(env.path("y.npy"))
        equal(shape, (3, 256), "y")
        near(y, [v for r in rows for v in ref.mlp(*parts, r)], "f4", prefix, chain=2)
        for name, args in (("x2.npy", []), ("xb.npy", ["--bf16"])):
            d.ctl_ok("run", "mlp", "tiny-deepseek", prefix, env.path(name), "-o", env.path("y2.npy"), *args)
            near(ref.npy_load(env.path("y2.npy"))[2], y, "f4", f"{prefix}, {name}")


def run_mla(env, d, *args):
    d.ctl_ok("run", "mla", "--q", env.path("q.npy"), "--kv", env.path("kv.npy"), "--indices", env.path("i.npy"),
             "-o", env.path("o.npy"), "--lse", env.path("lse.npy"), *args)
    return ref.npy_load(env.path("o.npy")), ref.npy_load(env.path("lse.npy"))


def test_mla_decode(env):
    """f16, bf16 and e4m3 caches; holes, repeated and invalid slots; a query without any slot."""
    d = env.shared()
    heads, dim, value_dim, slots = 3, 48, 32, 20
    q = wave(3 * heads * dim, 9)
    indices = [[0, 5, 19, 7, 7], [3, -1, 20, -2, 11], [-1, -1, -1, -1, -1]]
    cells = wave(slots * dim, 10)
    codes = [(i * 37 + 11) % 256 for i in range(slots * dim)]
    codes = [c if c & 0x7F != 0x7F else 0 for c in codes]  # no NaN
    caches = {
        "f16": ("<f2", [ref.round_half(v) for v in cells], [ref.round_half(v) for v in cells], []),
        "bf16": ("<u2", [ref.to_bf16(v) for v in cells], [ref.bf16(ref.to_bf16(v)) for v in cells], ["--bf16"]),
        "e4m3": ("|u1", codes, [0.01 * ref.e4m3(c) for c in codes], ["--kv-scale", "0.01"]),
    }
    ref.npy_save(env.path("q.npy"), "<f4", (3, heads, dim), q)
    for name, (descr, stored, values, args) in caches.items():
        ref.npy_save(env.path("kv.npy"), descr, (slots, dim), stored)
        cache = ref.rows_of(values, dim)
        want_o, want_lse = [], []
        for b in range(3):
            o, lse = ref.mla(ref.rows_of(q[b * heads * dim:(b + 1) * heads * dim], dim), cache, indices[b], 0.2,
                             value_dim)
            want_o += sum(o, [])
            want_lse += lse
        for index_descr in ("<i4", "<i8"):
            ref.npy_save(env.path("i.npy"), index_descr, (3, 5), sum(indices, []))
            (_, shape, o), (_, lse_shape, lse) = run_mla(env, d, "--scale", "0.2", "--value-dim", str(value_dim), *args)
            equal((shape, lse_shape), ((3, heads, value_dim), (3, heads)), f"{name}: shapes")
            near(o, want_o, "f4", f"{name}: o")
            check(not any(o[2 * heads * value_dim:]), f"{name}: a query of holes is not zero")
            equal(lse[2 * heads:], [-math.inf] * heads, f"{name}: lse of a query of holes")
            near(lse[:2 * heads], want_lse[:2 * heads], "f4", f"{name}: lse")


def test_mla_refusals(env):
    d = env.shared()
    ref.npy_save(env.path("i.npy"), "<i4", (1, 2), [0, 1])
    for heads, dim, args in ((1, 24, []), (1, 656, []), (129, 16, []), (1, 32, ["--value-dim", "24"]),
                             (1, 32, ["--value-dim", "48"])):
        ref.npy_save(env.path("q.npy"), "<f4", (1, heads, dim), [0.0] * (heads * dim))
        ref.npy_save(env.path("kv.npy"), "<f2", (4, dim), [0.0] * (4 * dim))
        rc, _, err = d.ctl("run", "mla", "--q", env.path("q.npy"), "--kv", env.path("kv.npy"), "--indices",
                           env.path("i.npy"), "--scale", "1", "-o", env.path("no.npy"), *args)
        check(rc in (2, 3) and err.strip(), f"heads {heads} dim {dim} {args}: status {rc}, {err}")
    ref.npy_save(env.path("q.npy"), "<f4", (1, 1, 512), [0.0] * 512)
    ref.npy_save(env.path("kv.npy"), "|u1", (4, 656), [0] * (4 * 656))
    rc, _, err = d.ctl("run", "mla", "--q", env.path("q.npy"), "--kv", env.path("kv.npy"), "--indices",
                       env.path("i.npy"), "--scale", "1", "-o", env.path("no.npy"))
    check(rc == 3 and "576" in err, f"records for a q of 512: status {rc}, {err}")


def test_mla_records(env):
    """The packed records of 656 bytes: 512 e4m3 values, 4 factors, 64 bf16 values."""
    d = env.shared()
    heads, slots = 2, 6
    codes = [(i * 37 + 11) % 256 for i in range(slots * 512)]
    codes = [c if c & 0x7F != 0x7F else 0 for c in codes]  # no NaN
    factors = [0.01 * (1 + i % 7) for i in range(slots * 4)]
    factors = list(struct.unpack(f"<{slots * 4}f", struct.pack(f"<{slots * 4}f", *factors)))
    rope = [ref.to_bf16(v) for v in wave(slots * 64, 3)]
    records, cache = b"", []
    for s in range(slots):
        part = codes[512 * s:512 * s + 512]
        records += bytes(part) + struct.pack("<4f", *factors[4 * s:4 * s + 4])
        records += struct.pack("<64H", *rope[64 * s:64 * s + 64])
        cache.append([ref.e4m3(c) * factors[4 * s + i // 128] for i, c in enumerate(part)] +
                     [ref.bf16(v) for v in rope[64 * s:64 * s + 64]])
    q = wave(2 * heads * 576, 9)
    indices = [[0, 5, 3], [4, -1, 4]]
    ref.npy_save(env.path("q.npy"), "<f4", (2, heads, 576), q)
    ref.npy_save(env.path("kv.npy"), "|u1", (slots, 656), list(records))
    ref.npy_save(env.path("i.npy"), "<i4", (2, 3), sum(indices, []))
    (_, shape, o), (_, _, lse) = run_mla(env, d, "--scale", "0.05")
    equal(shape, (2, heads, 512), "shape")
    want_o, want_lse = [], []
    for b in range(2):
        out, sums = ref.mla(ref.rows_of(q[b * heads * 576:(b + 1) * heads * 576], 576), cache, indices[b], 0.05, 512)
        want_o += sum(out, [])
        want_lse += sums
    near(o, want_o, "f4", "o")
    near(lse, want_lse, "f4", "lse")
