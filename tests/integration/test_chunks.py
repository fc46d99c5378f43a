# SPDX-License-Identifier: Apache-2.0
"""Long requests run in slices of their rows: the same results, others in between, cancelled and ended on time."""
import signal
import time

import exl3ref as ref
from harness import check, equal, wait_for
from test_metrics import fetch, parse
from test_tenants import MODULE, READY, say

DEVICE = False
ROWS = 600
LONG = "mla:32:64:4096:8192"  # heads, dim, keys, queries: 140 thousand million multiply-adds


def ramp(count, step=7919):
    return [((i * step) % 1999 - 999) / 999 for i in range(count)]


def operands(env):
    """Files for one request of each operation; {operation: arguments of exl3ctl run}."""
    def save(name, dtype, shape, values):
        ref.npy_save(env.path(name), dtype, shape, values)
        return env.path(name)
    heads, dim, keys, slots = 4, 64, 32, 128
    return {
        "linear": ("linear", "tiny-llama", MODULE, save("x.npy", "<f4", (ROWS, 1024), ramp(ROWS * 1024))),
        "mlp": ("mlp", "tiny-llama", "model.layers.0.mlp", save("h.npy", "<f4", (ROWS, 384), ramp(ROWS * 384))),
        "moe": ("moe", "tiny-deepseek", "model.layers.1.mlp.experts", save("t.npy", "<f4", (ROWS, 256), ramp(ROWS * 256)),
                "--ids", save("ids.npy", "<i4", (ROWS, 4), [(i * 5 + i // 4) % 16 if i % 11 else -1 for i in range(ROWS * 4)]),
                "--weights", save("w.npy", "<f4", (ROWS, 4), [0.25 + i % 3 / 8 for i in range(ROWS * 4)])),
        "mla_decode": ("mla", "--q", save("q.npy", "<f4", (ROWS, heads, dim), ramp(ROWS * heads * dim)),
                       "--kv", save("kv.npy", "<f2", (slots, dim), ramp(slots * dim, 31)),
                       "--indices", save("i.npy", "<i4", (ROWS, keys), [(i * 7) % slots if i % 13 else -1 for i in range(ROWS * keys)]),
                       "--scale", "0.1", "--value-dim", "48", "--lse", env.path("lse.npy")),
    }


def test_results_are_those_of_one_launch(env):
    """Every operation in slices of about a microsecond, and whole: the same bits."""
    runs, results = operands(env), {}
    for chunk in (0, 1):
        d = env.daemon(("tiny-llama", "tiny-deepseek"), ("--chunk-us", str(chunk)))
        for what, args in runs.items():
            for _ in range(2):  # the second one with what the first has taught
                d.ctl_ok("run", *args, "-o", env.path("y.npy"))
            results[what, chunk] = [open(env.path(name), "rb").read() for name in ("y.npy", "lse.npy") if name == "y.npy" or what == "mla_decode"]
        v = parse(fetch(d.sock + ".metrics"))
        for op in runs:
            slices, launches = v[f'exl3_slices_total{{op="{op}"}}'], v[f'exl3_device_seconds_count{{op="{op}"}}']
            if chunk:
                check(slices > 2 and launches >= slices, f"{op}: {slices} slices, {launches} launches")
            else:
                equal((slices, launches), (0, 2), f"{op} in one launch each")
            equal(v[f'exl3_launch_rows_sum{{op="{op}"}}'], 2 * ROWS, f"rows of {op}")
        d.stop()
    for what in runs:
        check(results[what, 0] == results[what, 1], f"{what}: other bits in slices")


def test_a_request_of_minutes(env):
    """It ends at its deadline or when it is cancelled, not when it is done; others have their turn meanwhile."""
    d = env.daemon(("tiny-llama",))

    def rows():
        """Of the long ones, that have been on the device: each would have 8192."""
        return parse(fetch(d.sock + ".metrics")).get('exl3_launch_rows_sum{op="mla_decode"}', 0)
    start = time.monotonic()
    told = say(env, d, "hello", "arena:134217728", "channel:8", f"{LONG}:800", "wait")
    took = time.monotonic() - start
    equal(told[-1][1], -62, f"a deadline between slices ({told[-1]})")
    check(took > 0.7, f"ended before its deadline, after {took:.1f} s")
    first = rows()
    check(first < 8192, "a deadline ended it when all of it had run")
    told = say(env, d, "hello", "arena:134217728", "channel:8", f"{LONG}:0", "sleep:500", "drop:0", "wait")
    check(told[-1][1] == -125 and "1 failed" in told[-1][2], f"cancelled while it runs: {told[-1]}")
    second = rows()
    check(second - first < 8192, "cancelled when all of it had run")
    proc = env.spawn(env.program("tests/integration/tenants"), d.sock, "hello", "arena:134217728", "channel:8", f"{LONG}:0", "wait")
    wait_for(lambda: rows() > second, "the long one to begin")
    told = say(env, d, "hello", *READY, "linear:1:1", "linear:1:1", "linear:1:1")
    equal([t[1] for t in told[-3:]], [0, 0, 0], "others")
    check(rows() - second < 8192 and proc.poll() is None, "others had to wait until the long one was done")
    proc.kill()
    proc.wait()
    equal(d.stop(), 0, "status after SIGTERM")


def test_chunk_us_is_reloaded(env):
    """SIGHUP changes how long a launch may take."""
    conf = env.path("chunk.conf")
    with open(conf, "w") as f:
        f.write("chunk-us = 0\n")
    d = env.daemon(("tiny-llama",), ("--config", conf))
    args = operands(env)["linear"]
    d.ctl_ok("run", *args, "-o", env.path("y.npy"))
    equal(parse(fetch(d.sock + ".metrics"))['exl3_slices_total{op="linear"}'], 0, "slices at first")
    with open(conf, "w") as f:
        f.write("chunk-us = 1\n")
    d.proc.send_signal(signal.SIGHUP)
    wait_for(lambda: "configuration read again" in d.log(), "the reload")
    d.ctl_ok("run", *args, "-o", env.path("y.npy"))
    check(parse(fetch(d.sock + ".metrics"))['exl3_slices_total{op="linear"}'] > 1, "slices after the reload")
    equal(d.stop(), 0, "status after SIGTERM")
