# SPDX-License-Identifier: Apache-2.0
"""Several devices in one worker: where models live, what runs where, and the order of a channel across them."""
import os
import signal

import exl3ref as ref
import harness
from harness import check, equal, wait_for
from test_linear import near, wave

LAYERS = os.path.join(harness.MODELS, "layers")
TINY = os.path.join(harness.MODELS, "tiny-llama")


def two(env, *args):
    """The same model on the default device and on another one."""
    return env.daemon((f"here={LAYERS}", f"there={LAYERS},device=cpu:1"), args)


def first(env):
    return f"{env.backend}:0"


def test_models_live_on_their_devices(env):
    d = two(env)
    devices = {v["name"]: v for v in d.status()["devices"]}
    equal(list(devices), [first(env), "cpu:1"], "devices, the default one first")
    for name, v in devices.items():
        check(v["models"] == 1 and v["weight_bytes"] > 0 and v["slab_bytes"] >= v["weight_bytes"], f"{name}: {v}")
        # Padding and tables: a fiftieth of the weights, and what rounding to the GPU's pages takes of each model.
        rest = v["slab_bytes"] - v["weight_bytes"] - v.get("tensor_bytes", 0)
        check(rest <= v["weight_bytes"] / 50 + (2 << 20), f"{name}: {rest} bytes beyond the weights")
    equal({m["name"]: m["device"] for m in d.json("models")["models"]}, {"here": first(env), "there": "cpu:1"}, "devices")
    equal({m["device"] for m in d.json("modules", "there")["modules"]}, {"cpu:1"}, "device of modules")
    text = d.ctl_ok("status")
    check("device cpu:1:" in text and f"device {first(env)}:" in text, f"status: {text}")
    x = env.path("x.npy")
    ref.npy_save(x, "<f4", (3, 256), wave(3 * 256))
    got = {}
    for model in ("here", "there"):
        y = env.path(f"{model}.npy")
        d.ctl_ok("run", "linear", model, "k4.mul1", x, "-o", y)
        got[model] = ref.npy_load(y)[2]
    near(got["there"], got["here"], "f4", "the same module on two devices")
    if env.backend == "cpu":
        equal(got["there"], got["here"], "bits of the same module on two parts of the cpu")


def test_devices_at_run_time(env):
    """A load goes to any open device; others are refused with those that there are; a restart keeps the device."""
    d = env.daemon((), ("--devices", "cpu:1, cpu:2"))
    equal([v["name"] for v in d.status()["devices"]], [first(env), "cpu:1", "cpu:2"], "devices")
    d.ctl_ok("load", f"a={TINY}", "--device", "cpu:2")
    d.ctl_ok("load", f"b={TINY}")
    rc, _, err = d.ctl("load", f"c={TINY}", "--device", "cpu:5")
    check(rc == 3 and "cpu:2" in err and "not open" in err, f"a device that is not open: status {rc}, {err}")
    rc, _, err = d.ctl("load", f"c={TINY}", "--device", "cpu:0" if env.backend == "cuda" else "abacus:0")
    check(rc == 3 and err.strip(), f"another device: status {rc}, {err}")
    before = d.worker_pid()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: d.ctl("status")[0] == 0 and d.worker_pid() != before, "another worker")
    d.wait_ready()
    equal({m["name"]: m["device"] for m in d.status()["models"]}, {"a": "cpu:2", "b": first(env)},
          "devices after the restart")
    equal(d.stop(), 0, "status after SIGTERM")


def test_a_device_that_cannot_be_opened(env):
    """Named by the configuration it ends the start with a sentence."""
    for args in (("--device", "cpu:8", "--backend", "cpu"), ("--device", "cuda:0", "--backend", "cpu"),
                 ("--devices", "cpu:99"), ("--model", f"m={LAYERS},device=cpu:9")):
        d = env.daemon((), args, wait=False)
        equal(d.wait_exit(), 1, f"status with {' '.join(args)}: {d.log()}")
        check("device" in d.log(), f"the log does not say why: {d.log()}")


def test_order_across_devices(env):
    """y of each request is x of the next one, which runs on the other device; all are submitted at once."""
    d = two(env)
    rc, out, err = env.run(env.program("tests/integration/devices"), d.sock, "40" if env.short else "200")
    equal(rc, 0, f"client: {err.strip() or out.strip()}")
    check(f"devices {first(env)} cpu:1" in out, f"client: {out}")
    equal(d.status()["errors"], 0, "errors")


def test_where_mla_runs(env):
    """A geometry has no model: its device is named, and the client shows up there."""
    d = two(env)
    q, kv, indices = env.path("q.npy"), env.path("kv.npy"), env.path("i.npy")
    ref.npy_save(q, "<f4", (2, 4, 64), wave(2 * 4 * 64))
    ref.npy_save(kv, "<f2", (16, 64), wave(16 * 64, 1))
    ref.npy_save(indices, "<i4", (2, 8), [i % 16 for i in range(16)])
    got = []
    for device in ((), ("--device", "cpu:1")):
        o = env.path("o.npy")
        d.ctl_ok("run", "mla", "--q", q, "--kv", kv, "--indices", indices, "--scale", "0.125", "-o", o, *device)
        got.append(ref.npy_load(o)[2])
    near(got[1], got[0], "f4", "MLA on two devices")
    rc, _, err = d.ctl("run", "mla", "--q", q, "--kv", kv, "--indices", indices, "--scale", "0.125", "-o", o,
                       "--device", "cpu:7")
    check(rc == 3 and "not open" in err, f"MLA on a device that is not open: status {rc}, {err}")


def test_unquantized_tensors_on_the_device(env):
    """A copy that clients can import, for those that the policy trusts with it; also in the next worker."""
    name = "model.embed_tokens.weight"
    d = env.daemon((f"host={TINY}", f"device={TINY},unquantized=device"), ("--tenant", "default:mapped=yes"))
    gpu = env.backend != "cpu"
    held = {m["name"]: m.get("device_tensor_bytes", 0) for m in d.json("models")["models"]}
    equal((held["host"], held["device"] > 0), (0, gpu), "bytes of the copies")

    def opens(model, sock=d.sock):
        return env.run(env.program("tests/integration/device_tensor"), sock, model, name)
    for _ in range(2):
        rc, out, err = opens("device")
        check(rc == 0 and out.startswith(f"{first(env)} {'gpu' if gpu else 'host'} "), f"status {rc}: {out}{err}")
        rc, out, err = opens("host")
        check(rc == (3 if gpu else 0) and (not gpu or "unquantized = device" in err), f"status {rc}: {out}{err}")
        before = d.worker_pid()
        os.kill(before, signal.SIGKILL)
        wait_for(lambda: d.ctl("status")[0] == 0 and d.worker_pid() != before, "another worker")
        d.wait_ready()
    d.ctl_ok("load", f"later={TINY}", "--unquantized", "device")
    equal(opens("later")[0], 0, "status for a model that was loaded at run time")
    rc, _, err = d.ctl("load", f"wrong={TINY}", "--unquantized", "moon")
    check(rc == 2 and "host or device" in err, f"status {rc}: {err}")
    d = env.daemon((f"device={TINY},unquantized=device",))
    rc, out, err = opens("device", d.sock)
    check(rc == (3 if gpu else 0) and (not gpu or "mapped" in err), f"a tenant that may not: status {rc}: {out}{err}")
