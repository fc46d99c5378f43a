# SPDX-License-Identifier: Apache-2.0
"""Linear layers through exl3ctl against the independent reference: bitrates, codebooks, types, orders, padding."""
import math

import exl3ref as ref
import harness
from harness import check, equal

# Largest and rms difference, of the rms of y. The cpu backend's f32 differs from the reference by its order of
# summation; 16-bit outputs round; the cuda backend multiplies 16-bit numbers.
TOL = {"f4": (2e-4, 2e-5), "f2": (5e-3, 1e-3), "bf16": (2e-2, 4e-3)}


def near(got, want, kind, what, chain=1):
    """chain: products in a row, each of which rounds its input to f16 on backends other than cpu."""
    largest, rms = ref.relative_errors(got, want)
    tol = TOL["f2" if kind == "f4" and harness.BACKEND != "cpu" else kind]
    tol = [t * (1 if harness.BACKEND == "cpu" else chain) for t in tol]
    check(largest <= tol[0] and rms <= tol[1], f"{what}: differs by {largest:.2e} (rms {rms:.2e})")


def wave(n, seed=0):
    return [((i * 7919 + seed * 104729) % 2003 - 1001) / 500 for i in range(n)]


def layers(env):
    folder = env.model("layers")
    return ref.load(f"{folder}/layers.safetensors", f"{folder}/original.safetensors")


def run_linear(env, d, model, module, x, *args):
    out = env.path("y.npy")
    d.ctl_ok("run", "linear", model, module, x, "-o", out, *args)
    return ref.npy_load(out)


def test_every_bitrate_and_codebook(env):
    d, tensors = env.shared(), layers(env)
    rows = ref.rows_of(tensors["input"].floats(), 256)[:2 if env.short else 8]
    ref.npy_save(env.path("x.npy"), "<f4", (len(rows), 256), [v for r in rows for v in r])
    for bits in range(1, 9):
        for kind in ref.NAMES:
            name = f"k{bits}.{kind}"
            matrix = ref.Matrix(tensors, name)
            equal((matrix.rate2, matrix.kind), (2 * bits, ref.NAMES.index(kind)), name)
            descr, shape, y = run_linear(env, d, "layers", name, env.path("x.npy"))
            equal((descr, shape), ("<f4", (len(rows), 384)), f"{name}: y")
            near(y, [v for r in rows for v in matrix.apply(r)], "f4", name)


def test_input_and_output_types(env):
    d, matrix = env.shared(), ref.Matrix(layers(env), "k4.mul1")
    x = wave(3 * 256)
    half, brain = [ref.round_half(v) for v in x], [ref.to_bf16(v) for v in x]
    files = {"f4": ("<f4", x, x), "f2": ("<f2", half, half), "bf16": ("<u2", brain, [ref.bf16(b) for b in brain])}
    for kind, (descr, stored, values) in files.items():
        path = env.path(f"x-{kind}.npy")
        ref.npy_save(path, descr, (3, 256), stored)
        want = [v for r in ref.rows_of(values, 256) for v in matrix.apply(r)]
        extra = ["--bf16"] if kind == "bf16" else []
        got = run_linear(env, d, "layers", "k4.mul1", path, *extra)
        equal(got[:2], ("<f4", (3, 384)), f"{kind}: y unless --dtype says otherwise")
        near(got[2], want, "f4", f"{kind} in, f32 out")
        for name, out_descr in (("f32", "<f4"), ("f16", "<f2"), ("bf16", "<u2")):
            got = run_linear(env, d, "layers", "k4.mul1", path, "--dtype", name, *extra)
            equal(got[0], out_descr, f"--dtype {name}")
            y = [ref.bf16(b) for b in got[2]] if name == "bf16" else got[2]
            near(y, want, {"f32": "f4", "f16": "f2"}.get(name, name), f"{kind} in, {name} out")
    rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", env.path("x-bf16.npy"), "-o", env.path("no.npy"))
    equal(rc, 1, f"u2 without --bf16 ({err.strip()})")
    check("bf16" in err, f"u2 without --bf16: the message does not name the flag: {err}")


def test_column_major_and_version_2_files(env):
    d = env.shared()
    x = wave(3 * 256, 1)
    columns = [x[r * 256 + c] for c in range(256) for r in range(3)]
    ref.npy_save(env.path("c.npy"), "<f4", (3, 256), x)
    ref.npy_save(env.path("f.npy"), "<f4", (3, 256), columns, fortran=True)
    ref.npy_save(env.path("v2.npy"), "<f4", (3, 256), x, version=2)
    want = run_linear(env, d, "layers", "k3.mcg", env.path("c.npy"))
    for name in ("f.npy", "v2.npy"):
        equal(run_linear(env, d, "layers", "k3.mcg", env.path(name)), want, name)


def test_refused_files(env):
    d = env.shared()
    good = ref.npy_bytes("<f4", (2, 256), wave(512))
    cases = {
        "not there": None,
        "empty": b"",
        "no NumPy file": b"hello" * 100,
        "cut off": good[:-4],
        "header cut off": good[:40],
        "integers": ref.npy_bytes("<i4", (2, 256), [1] * 512),
        "doubles": ref.npy_bytes("<f8", (2, 256), wave(512)),
        "three dimensions": ref.npy_bytes("<f4", (2, 2, 128), wave(512)),
        "huge shape": good.replace(b"(2, 256)", b"(2, 2" + b"9" * 18 + b")"),
    }
    for what, data in cases.items():
        path = env.path(f"bad-{what.replace(' ', '-')}.npy")
        if data is not None:
            with open(path, "wb") as f:
                f.write(data)
        rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", path, "-o", env.path("no.npy"))
        equal(rc, 1, f"{what} ({err.strip()})")
        check(err.strip(), f"{what}: no message")
    for path in ("/dev/zero", env.tmp):
        rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", path, "-o", env.path("no.npy"))
        check(rc == 1 and path in err, f"{path} as a file: status {rc}, {err}")
    ref.npy_save(env.path("narrow.npy"), "<f4", (2, 255), wave(510))
    rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", env.path("narrow.npy"), "-o", env.path("no.npy"))
    check(rc in (1, 3) and "256" in err, f"255 columns: status {rc}, {err}")
    rc, _, err = d.ctl("run", "linear", "layers", "k4.nonesuch", env.path("narrow.npy"), "-o", env.path("no.npy"))
    equal(rc, 3, f"no such module ({err.strip()})")


def test_rows(env):
    """Every row is its own: 1, 33, 8192 and 8193 of them, each equal to the row computed alone."""
    d = env.shared()
    x = wave(33 * 256, 2)
    ref.npy_save(env.path("one.npy"), "<f4", (1, 256), x[:256])
    ref.npy_save(env.path("many.npy"), "<f4", (33, 256), x)
    one = run_linear(env, d, "layers", "k5.mul1", env.path("one.npy"))[2]
    many = run_linear(env, d, "layers", "k5.mul1", env.path("many.npy"))[2]
    near(many[:384], one, "f4", "first of 33 rows")
    matrix = ref.Matrix(layers(env), "k5.mul1")
    near(many[32 * 384:], matrix.apply(x[32 * 256:]), "f4", "last of 33 rows")
    if not env.short:
        half = [ref.round_half(v) for v in x[-256:]]
        for rows in (8192, 8193):  # exl3ctl makes two requests of the second
            ref.npy_save(env.path("most.npy"), "<f2", (rows, 256), (x[:256] * (rows - 1)) + x[-256:])
            _, shape, got = run_linear(env, d, "layers", "k5.mul1", env.path("most.npy"))
            equal(shape, (rows, 384), f"{rows} rows")
            near(got[-384:], matrix.apply(half), "f4", f"last of {rows} rows")


def test_padded_output(env):
    """kv_a_proj_with_mqa: 160 outputs, stored as 256."""
    d = env.shared()
    folder = env.model("tiny-deepseek")
    tensors = ref.load(*(f"{folder}/model-0000{i}-of-00002.safetensors" for i in (1, 2)))
    name = "model.layers.2.self_attn.kv_a_proj_with_mqa"
    matrix = ref.Matrix(tensors, name)
    x = wave(2 * 256, 3)
    ref.npy_save(env.path("x.npy"), "<f4", (2, 256), x)
    want = [matrix.apply(r) for r in ref.rows_of(x, 256)]
    _, shape, logical = run_linear(env, d, "tiny-deepseek", name, env.path("x.npy"))
    equal(shape, (2, 160), "logical size of y")
    near(logical, [v for r in want for v in r[:160]], "f4", "logical")
    _, shape, stored = run_linear(env, d, "tiny-deepseek", name, env.path("x.npy"), "--stored")
    equal(shape, (2, 256), "stored size of y")
    equal([v for r in ref.rows_of(stored, 256) for v in r[:160]], logical, "stored and logical columns")
    check(not any(v for r in ref.rows_of(stored, 256) for v in r[160:]), "padded columns are not zero")


def test_fused_groups_equal_single_matrices(env):
    """Bit for bit on the cpu, in every layer of tiny-llama: bitrates and codebooks differ inside the groups."""
    d = env.shared()
    ref.npy_save(env.path("x1.npy"), "<f4", (1, 384), wave(384, 4))
    ref.npy_save(env.path("x5.npy"), "<f2", (5, 384), wave(5 * 384, 5))
    groups = {"self_attn.qkv_proj": ("q_proj", "k_proj", "v_proj"), "mlp.gate_up_proj": ("gate_proj", "up_proj")}
    for layer in (0, 3, 4) if env.short else range(6):
        for fused, parts in groups.items():
            for x in ("x1.npy", "x5.npy"):
                name = f"model.layers.{layer}.{fused}"
                _, (rows, width), got = run_linear(env, d, "tiny-llama", name, env.path(x))
                singles = []
                for part in parts:
                    _, (_, n), y = run_linear(env, d, "tiny-llama", f"{name.rsplit('.', 1)[0]}.{part}", env.path(x))
                    singles.append(ref.rows_of(y, n))
                want = [v for r in range(rows) for s in singles for v in s[r]]
                equal(width * rows, len(want), f"{name}: size")
                if env.backend == "cpu":
                    check(got == want, f"{name}, {rows} rows: not the bits of the single matrices")
                else:
                    near(got, want, "f4", f"{name}, {rows} rows")


def test_nan_and_infinity_stay_in_their_rows(env):
    d = env.shared()
    x = wave(5 * 256, 16)
    spoiled = list(x)
    spoiled[1 * 256 + 7], spoiled[3 * 256 + 200] = math.nan, math.inf
    for name, values in (("good", x), ("spoiled", spoiled)):
        ref.npy_save(env.path(f"{name}.npy"), "<f4", (5, 256), values)
    for module in ("k4.mul1", "k2.mcg"):
        good, got = (ref.rows_of(run_linear(env, d, "layers", module, env.path(f"{n}.npy"), "--deterministic")[2], 384)
                     for n in ("good", "spoiled"))
        for r in (0, 2, 4):
            check(got[r] == good[r], f"{module}: row {r} has other bits beside NaN and infinity")
        for r in (1, 3):
            check(not any(math.isfinite(v) for v in got[r]), f"{module}: a row of NaN or infinity gave finite numbers")
