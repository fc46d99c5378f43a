# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of every kind that the format allows, made here, loaded by the daemon, compared with the reference."""
import json
import os
import random
import shutil
import struct

import exl3ref as ref
from harness import check, equal
from test_linear import near, wave

MULTIPLIERS = {1: 0xCBAC1FED, 2: 0x83DCD12D}


class Maker:
    """Random but legal tensors: every bit pattern is a tile."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.tensors = {}

    def halves(self, count, scale):
        return b"".join(struct.pack("<e", self.random.choice((-scale, scale)) * self.random.uniform(0.5, 1))
                        for _ in range(count))

    def matrix(self, name, k, n, rate2=8, kind=2, marker_shape=(), bias=None, signs=False, multiplier=None):
        r, t = self.random, self.tensors
        t[name + ".trellis"] = ref.Tensor("I16", [k // 16, n // 16, 8 * rate2],
                                          r.randbytes(k // 16 * (n // 16) * 16 * rate2))
        if signs:
            t[name + ".su"] = ref.Tensor("I16", [k // 16], r.randbytes(k // 8))
            t[name + ".sv"] = ref.Tensor("I16", [n // 16], r.randbytes(n // 8))
        else:
            t[name + ".suh"] = ref.Tensor("F16", [k], self.halves(k, 1 / 16))
            t[name + ".svh"] = ref.Tensor("F16", [n], self.halves(n, 1))
        if kind:
            value = struct.pack("<I", multiplier or MULTIPLIERS[kind])
            t[f"{name}.{'mcg' if kind == 1 else 'mul1'}"] = ref.Tensor("I32", list(marker_shape), value)
        if bias:
            values = [r.uniform(-1, 1) for _ in range(n)]
            data = {"F16": lambda v: struct.pack("<e", v), "F32": lambda v: struct.pack("<f", v),
                    "BF16": lambda v: struct.pack("<H", ref.to_bf16(v))}[bias]
            t[name + ".bias"] = ref.Tensor(bias, [n], b"".join(data(v) for v in values))
        return name

    def plain(self, name, shape, dtype="F16"):
        count = 1
        for s in shape:
            count *= s
        self.tensors[name] = ref.Tensor(dtype, list(shape), self.halves(count, 1))

    def reference(self, name, k=None, n=None):
        """The matrix as the reference sees it; packed signs become scales."""
        tensors = dict(self.tensors)
        for packed, scales in ((".su", ".suh"), (".sv", ".svh")):
            if name + packed in tensors:
                words = struct.unpack(f"<{tensors[name + packed].shape[0]}H", tensors[name + packed].data)
                values = [-1.0 if w >> i & 1 else 1.0 for w in words for i in range(16)]
                tensors[name + scales] = ref.Tensor("F16", [len(values)], struct.pack(f"<{len(values)}e", *values))
        return ref.Matrix(tensors, name, k, n)


def folder(env, name, config=None):
    path = env.path(f"made-{name}")
    shutil.rmtree(path, ignore_errors=True)
    os.mkdir(path)
    if config:
        with open(os.path.join(path, "config.json"), "w") as f:
            json.dump(config, f)
    return path


def run(env, d, op, model, name, x, width, *args):
    ref.npy_save(env.path("fx.npy"), "<f4", (len(x) // width, width), x)
    d.ctl_ok("run", op, model, name, env.path("fx.npy"), "-o", env.path("fy.npy"), *args)
    return ref.npy_load(env.path("fy.npy"))


def compare(env, d, model, maker, name, k=None, n=None, rows=2):
    m = maker.reference(name, k, n)
    x = wave(rows * m.k_log, 11)
    _, shape, y = run(env, d, "linear", model, name, x, m.k_log)
    equal(shape, (rows, m.n_log), f"{name}: y")
    near(y, [v for r in ref.rows_of(x, m.k_log) for v in m.apply(r)], "f4", name)


def test_bitrates_markers_signs_and_biases(env):
    """Half bitrates, markers of any one-element shape, packed signs, biases of three types, odd offsets."""
    maker = Maker(1)
    names = [maker.matrix(f"half{r}", 128, 256, rate2=r) for r in (3, 5, 7)]
    names += [maker.matrix(f"shape{i}", 256, 128, kind=1 + i % 2, marker_shape=s)
              for i, s in enumerate(((), (1,), (1, 1), (1, 1, 1)))]
    names += [maker.matrix(f"signs{k}", 128, 128, kind=k, signs=True) for k in range(3)]
    names += [maker.matrix(f"bias{b}", 128, 256, bias=b) for b in ("F16", "BF16", "F32")]
    maker.tensors["odd"] = ref.Tensor("U8", [3], b"abc")  # everything behind it is unaligned
    path = folder(env, "variants")
    order = ["odd"] + [n for n in maker.tensors if n != "odd"]
    ref.save(os.path.join(path, "model.safetensors"), {n: maker.tensors[n] for n in order})
    d = env.daemon((f"m={path}",))
    for name in names:
        compare(env, d, "m", maker, name)


def test_shards_index_and_add_on(env):
    """An index names two shards; a third file beside them is not in it and counts too."""
    maker = Maker(2)
    names = [maker.matrix(f"model.layers.{i}.self_attn.o_proj", 128, 128) for i in range(3)]
    path = folder(env, "shards", {"model_type": "llama", "hidden_size": 128})
    weight_map = {}
    for i, name in enumerate(names):
        file = f"model-0000{i + 1}-of-00002.safetensors" if i < 2 else "mtp.safetensors"
        part = {n: t for n, t in maker.tensors.items() if n.startswith(name + ".")}
        ref.save(os.path.join(path, file), part)
        weight_map.update({n: file for n in part if i < 2})
    with open(os.path.join(path, "model.safetensors.index.json"), "w") as f:
        json.dump({"metadata": {}, "weight_map": weight_map}, f)
    d = env.daemon((f"m={path}",))
    for name in names:
        compare(env, d, "m", maker, name)
    # A shard that the index names and that is not there: refused.
    os.unlink(os.path.join(path, "model-00002-of-00002.safetensors"))
    rc, _, err = d.ctl("load", f"again={path}")
    equal(rc, 3, "a missing shard")
    check("model-00002-of-00002.safetensors" in err, f"the message does not name the shard: {err}")


def test_fingerprint_is_of_the_content(env):
    """The same tensors in one file or in three: one fingerprint. One bit more: another."""
    maker = Maker(3)
    for i in range(3):
        maker.matrix(f"m{i}", 128, 128)
    one, three, other = folder(env, "one"), folder(env, "three"), folder(env, "other")
    ref.save(os.path.join(one, "model.safetensors"), maker.tensors)
    for i in range(3):
        ref.save(os.path.join(three, f"part{i}.safetensors"),
                 {n: t for n, t in maker.tensors.items() if n.startswith(f"m{i}.")})
    data = maker.tensors["m1.trellis"].data
    maker.tensors["m1.trellis"].data = bytes([data[0] ^ 1]) + data[1:]
    ref.save(os.path.join(other, "model.safetensors"), maker.tensors)
    d = env.daemon((f"one={one}", f"three={three}", f"other={other}"))
    prints = {m["name"]: m["fingerprint"] for m in d.status()["models"]}
    equal(prints["one"], prints["three"], "fingerprints of one content")
    check(prints["one"] != prints["other"], "another content has the same fingerprint")


def test_padding_from_the_config(env):
    """hidden 200 and intermediate 300 are stored as 256 and 384."""
    maker = Maker(4)
    mlp = "model.layers.0.mlp"
    config = {"model_type": "llama", "hidden_size": 200, "intermediate_size": 300, "num_attention_heads": 4,
              "head_dim": 50, "num_hidden_layers": 1, "vocab_size": 1000, "hidden_act": "silu"}
    maker.matrix(f"{mlp}.gate_proj", 256, 384, rate2=6)
    maker.matrix(f"{mlp}.up_proj", 256, 384, rate2=8)
    maker.matrix(f"{mlp}.down_proj", 384, 256, rate2=10)
    maker.matrix("model.layers.0.self_attn.o_proj", 256, 256)
    maker.matrix("lm_head", 256, 1024, kind=1)
    path = folder(env, "padded", config)
    ref.save(os.path.join(path, "model.safetensors"), maker.tensors)
    d = env.daemon((f"m={path}",))
    compare(env, d, "m", maker, f"{mlp}.gate_proj", 200, 300)
    compare(env, d, "m", maker, f"{mlp}.down_proj", 300, 200)
    compare(env, d, "m", maker, "lm_head", 200, 1000)
    parts = [maker.reference(f"{mlp}.{p}_proj", *s) for p, s in
             (("gate", (200, 300)), ("up", (200, 300)), ("down", (300, 200)))]
    x = wave(2 * 200, 12)
    _, shape, y = run(env, d, "mlp", "m", mlp, x, 200)
    equal(shape, (2, 200), "mlp: y")
    near(y, [v for r in ref.rows_of(x, 200) for v in ref.mlp(*parts, r)], "f4", "mlp with padding")
    # A fused group has the logical sizes of each shard, side by side.
    _, shape, y = run(env, d, "linear", "m", f"{mlp}.gate_up_proj", x, 200)
    equal(shape, (2, 600), "gate_up_proj: y")
    near(y, [v for r in ref.rows_of(x, 200) for p in parts[:2] for v in p.apply(r)], "f4", "fused with padding")
    _, shape, _ = run(env, d, "linear", "m", f"{mlp}.gate_up_proj", wave(256, 1), 256, "--stored")
    equal(shape, (1, 768), "gate_up_proj: stored y")


def test_experts_of_every_kind(env):
    """Other spellings, bitrates and codebooks that differ by expert, biases, and experts without a gate."""
    rates = {0: (4, 2), 1: (6, 1), 2: (16, 0), 3: (5, 2)}
    kinds = (("mixtral", "model.layers.0.block_sparse_moe", ("w1", "w3", "w2"), "silu"),
             ("nemotron_h", "backbone.layers.1.mixer", (None, "up_proj", "down_proj"), "relu2"))
    models = []
    for model_type, prefix, parts, act in kinds:
        maker = Maker(5)
        for e, (rate2, kind) in rates.items():
            for part, (k, n) in zip(parts, ((128, 256), (128, 256), (256, 128))):
                if part:
                    maker.matrix(f"{prefix}.experts.{e}.{part}", k, n, rate2=rate2, kind=kind, bias="F16")
        path = folder(env, model_type, {"model_type": model_type, "hidden_size": 128, "intermediate_size": 256,
                                        "num_local_experts": 4, "hidden_act": act, "mlp_hidden_act": act})
        ref.save(os.path.join(path, "model.safetensors"), maker.tensors)
        models.append((f"{model_type}={path}", maker))
    d = env.daemon([spec for spec, _ in models])
    x, ids, weights = wave(3 * 128, 13), [[0, 1], [2, 3], [3, -1]], [[0.5, 0.25], [1.0, -0.5], [2.0, 7.0]]
    ref.npy_save(env.path("fi.npy"), "<i8", (3, 2), sum(ids, []))
    ref.npy_save(env.path("fw.npy"), "<f4", (3, 2), sum(weights, []))
    files = ["--ids", env.path("fi.npy"), "--weights", env.path("fw.npy")]
    for (model_type, prefix, parts, act), (_, maker) in zip(kinds, models):
        experts = {e: [p and maker.reference(f"{prefix}.experts.{e}.{p}") for p in parts] for e in rates}
        want = []
        for row, row_ids, row_weights in zip(ref.rows_of(x, 128), ids, weights):
            y = [0.0] * 128
            for e, w in zip(row_ids, row_weights):
                if e >= 0:
                    y = [a + w * b for a, b in zip(y, ref.mlp(*experts[e], row, act))]
            want += y
        _, shape, y = run(env, d, "moe", model_type, prefix, x, 128, *files)
        equal(shape, (3, 128), f"{prefix}: y")
        near(y, want, "f4", f"{prefix}, activation of config.json")


def test_sliced_mlp(env):
    """A dense MLP that was cut for the writer's limit: slices of gate and up by columns, of down by rows."""
    maker = Maker(6)
    mlp = "model.layers.0.mlp"
    for i in range(2):
        maker.matrix(f"{mlp}.gate_proj.slice.{i}", 128, 256, rate2=6)
        maker.matrix(f"{mlp}.up_proj.slice.{i}", 128, 256, rate2=6)
        maker.matrix(f"{mlp}.down_proj.slice.{i}", 256, 128, rate2=8)
    path = folder(env, "sliced", {"model_type": "llama", "hidden_size": 128, "intermediate_size": 512,
                                  "hidden_act": "silu"})
    ref.save(os.path.join(path, "model.safetensors"), maker.tensors)
    d = env.daemon((f"m={path}",))
    x = wave(2 * 128, 14)
    _, _, y = run(env, d, "mlp", "m", mlp, x, 128)
    want = []
    for row in ref.rows_of(x, 128):
        parts = [ref.mlp(*(maker.reference(f"{mlp}.{p}_proj.slice.{i}") for p in ("gate", "up", "down")), row)
                 for i in range(2)]
        want += [a + b for a, b in zip(*parts)]
    near(y, want, "f4", "sliced mlp")


def test_what_is_not_supported(env):
    """Left out by name and reason; requests for it are refused with that reason; the rest loads."""
    maker = Maker(7)
    good = maker.matrix("good", 128, 128)
    maker.matrix("multiplier", 128, 128, kind=1, multiplier=0x12345679)
    maker.matrix("both", 128, 128, kind=1)
    maker.tensors["both.mul1"] = ref.Tensor("I32", [], struct.pack("<I", MULTIPLIERS[2]))
    maker.tensors["table.trellis"] = ref.Tensor("I16", [64, 40], bytes(64 * 80))
    maker.matrix("ranked.rank0", 128, 128)
    path = folder(env, "unsupported")
    ref.save(os.path.join(path, "model.safetensors"), maker.tensors)
    d = env.daemon((f"m={path}",))
    compare(env, d, "m", maker, good)
    skipped = "\n".join(next(m for m in d.json("models")["models"] if m["name"] == "m")["skipped"])
    ref.npy_save(env.path("fx.npy"), "<f4", (1, 128), wave(128))
    for name in ("multiplier", "both", "table", "ranked"):
        check(name in skipped, f"{name} is not listed as left out: {skipped}")
        wanted = "ranked.rank0" if name == "ranked" else name
        rc, _, err = d.ctl("run", "linear", "m", wanted, env.path("fx.npy"), "-o", env.path("no.npy"))
        check(rc == 3 and len(err) > 40, f"{name}: status {rc}, {err}")
