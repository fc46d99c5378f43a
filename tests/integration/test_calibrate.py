# SPDX-License-Identifier: Apache-2.0
"""The kernel is chosen by measurement: tables that are obeyed, refused, made, used after a restart, and what clients notice."""
import os
import signal
import struct
import time

import exl3ref as ref
from harness import check, equal, wait_for
from test_linear import near, wave
from test_merging import run as meet

K4 = "linear 256 384:4:mcg"  # the module k4.mcg of layers


def calibrate(env, d, *args):
    """A calibration to its end: the lines of its table."""
    path = env.path("table")
    d.ctl_ok("calibrate", "-o", path, *args, timeout=600)
    with open(path) as f:
        return f.read().splitlines()


def head(env):
    """What stands above the lines of a table for this device and build."""
    d = env.daemon(("layers",))
    lines = calibrate(env, d)
    d.stop()
    return [line for line in lines if not line.startswith("linear ")]


def write(env, name, lines):
    with open(env.path(name), "w") as f:
        f.write("\n".join(lines) + "\n")
    return env.path(name)


def choices(d, model, module):
    return [(int(c["m_first"]), int(c["m_last"]), c["kernel"], c["why"]) for c in d.json("kernels", model, module)["choices"]]


def linear(env, d, rows, *args):
    """The result's bits of so many rows through k4.mcg, and their values."""
    x = list(struct.unpack(f"<{rows * 256}f", struct.pack(f"<{rows * 256}f", *(v * 0.7310345 + 0.01130127 for v in wave(rows * 256, 15)))))
    ref.npy_save(env.path("x.npy"), "<f4", (rows, 256), x)
    d.ctl_ok("run", "linear", "layers", "k4.mcg", env.path("x.npy"), "-o", env.path("y.npy"), *args)
    with open(env.path("y.npy"), "rb") as f:
        return f.read(), x, ref.npy_load(env.path("y.npy"))[2]


def hup(d, said, times):
    os.kill(d.proc.pid, signal.SIGHUP)
    wait_for(lambda: d.log().count(said) == times, f"'{said}' in the log")


def test_a_table_is_obeyed(env):
    top = head(env)
    table = write(env, "t", top + [f"{K4} 1 4 linear_ref # as a comment", f"{K4} 8 8 no_such_kernel"])
    # Not in slices: each of those is looked up by its own rows.
    d = env.daemon(("layers",), ("--kernel-table", table, "--chunk-us", "0"))
    check("no variant 'no_such_kernel'" in d.log(), "an unknown variant is not said")
    got = choices(d, "layers", "k4.mcg")
    equal(got[0][:3], (1, 4, "linear_ref"), "choice by the table")
    check(table in got[0][3], f"why: {got}")
    equal((got[1][0], got[1][1], got[1][3]), (5, 8192, "order of preference"), "choice beyond it")
    usual = got[1][2]
    check(usual != "linear_ref", f"without a table: {usual}")

    # What the launch has used: the oracle's bits are others than those of the usual kernel.
    for rows, kernel in ((1, "linear_ref"), (4, "linear_ref"), (5, usual)):
        bits, x, y = linear(env, d, rows)
        equal(bits == linear(env, d, rows, "--kernel", "linear_ref")[0], kernel == "linear_ref", f"{rows} rows are of linear_ref")
        equal(bits == linear(env, d, rows, "--kernel", usual)[0], kernel == usual, f"{rows} rows are of {usual}")
        matrix = ref.Matrix(ref.load(os.path.join(env.model("layers"), "layers.safetensors")), "k4.mcg")
        near(y, [v for r in ref.rows_of(x, 256) for v in matrix.apply(r)], "f4", f"{rows} rows")

    # A module of another shape has no line, and a file that was changed counts with the next reload.
    check(choices(d, "layers", "k4.mul1")[0][2] == usual, "a line counts for another codebook")
    write(env, "t", top + [f"{K4} 1 1 linear_c"])
    hup(d, "configuration read again", 1)
    equal([c[2] for c in choices(d, "layers", "k4.mcg")][:2], ["linear_c", usual], "after a reload")


def test_wrong_tables_are_refused(env):
    top = head(env)
    table = write(env, "t", top + [f"{K4} 1 4 linear_c", f"{K4} 3 9 linear_c"])
    d = env.daemon(("layers",), ("--kernel-table", table))
    check("two lines are for 3 rows" in d.log(), f"overlapping lines: {d.log()[-500:]}")
    equal([c[3] for c in choices(d, "layers", "k4.mcg")], ["order of preference"], "choice with a wrong table")

    write(env, "t", top + [f"{K4} 1 4 linear_c"])
    hup(d, "configuration read again", 1)
    equal(choices(d, "layers", "k4.mcg")[0][2], "linear_c", "the table put right")
    # One that is wrong changes nothing; file and line are named.
    write(env, "t", top + [f"{K4} 1 4 linear_c", f"{K4} 9 8 linear_c"])
    hup(d, "the one before still counts", 1)
    check(f"{table}:{len(top) + 2}: rows are" in d.log(), f"line of a mistake: {d.log()[-500:]}")
    equal(choices(d, "layers", "k4.mcg")[0][2], "linear_c", "after a wrong table")
    # For another device or build: not used, with the reason.
    for word, other in (("device", "device cpu Another"), ("build", "build 0.0.1-00"), ("isa", "isa sse")):
        before = d.log().count("kernels are chosen without it")
        write(env, "t", [other if line.startswith(word) else line for line in top] + [f"{K4} 1 4 linear_c"])
        hup(d, "kernels are chosen without it", before + 1)
        check(other.split(" ", 1)[1] in d.log(), f"why {other} is not used: {d.log()[-500:]}")
        equal(choices(d, "layers", "k4.mcg")[0][3], "order of preference", other)
    os.unlink(table)
    os.mkfifo(table)  # nobody ever writes to it
    hup(d, "not a regular file", 1)
    os.unlink(table)
    linear(env, d, 2)


def test_calibrate(env):
    d = env.daemon(("layers",))
    lines = calibrate(env, d)
    mine = [line for line in lines if line.startswith(K4 + " ")]
    first, last = int(mine[0].split()[3]), int(mine[-1].split()[4])
    equal(first, 1, "first row of a shape")
    check(last >= 2, f"rows that were measured: {mine}")
    at = 1
    for line in mine:
        words = line.split()
        equal(int(words[3]), at, f"no gap above {line}")
        at = int(words[4]) + 1
        check(words[5] in line.split("#")[1], f"no time of the winner in {line}")
    check(not any(line.split()[5].endswith("_ref") for line in lines if line.startswith("linear ")), "the oracle was chosen")
    equal(choices(d, "layers", "k4.mcg")[0][3], "order of preference", "without --apply")
    calibrate(env, d, "--apply", "layers")
    equal(choices(d, "layers", "k4.mcg")[0][3], "measured: calibration", "with --apply")
    rc, _, err = d.ctl("calibrate", "nonesuch")
    check(rc == 3 and "nonesuch" in err, f"calibrate of a model that is not there: {rc}, {err}")
    d.stop()
    # After a restart the file counts, line by line.
    d = env.daemon(("layers",), ("--kernel-table", env.path("table")))
    got = choices(d, "layers", "k4.mcg")
    equal(got[0][3], "measured: " + env.path("table"), "after a restart")
    linear(env, d, 3)


def test_clients_are_served_meanwhile(env):
    d = env.daemon(("layers", "tiny-llama", "tiny-deepseek"))
    want = linear(env, d, 3)[0]

    def state():
        log = d.log()
        return log.count("shapes measured with"), log.count("cancelled:")

    # A client's requests end between two launches, and have the same bits.
    proc = env.spawn(env.program("exl3ctl"), "--socket", d.sock, "calibrate", "-o", env.path("other"))
    wait_for(lambda: "calibrate: " in d.log(), "a calibration that has begun")
    served = 0
    for _ in range(5):
        equal(linear(env, d, 3)[0], want, "bits while others are measured")
        served += state() == (0, 0)
    check(served >= 2, f"{served} requests were served before the calibration's end")
    rc, _, err = d.ctl("calibrate")
    check(rc == 3 and "under way" in err, f"a second calibration: {rc}, {err}")

    # It ends with the client that wanted it, and its models can go at once.
    proc.kill()
    proc.wait()
    wait_for(lambda: state()[1] == 1, "a calibration that is cancelled")
    proc = env.spawn(env.program("exl3ctl"), "--socket", d.sock, "calibrate", "-o", env.path("other"))
    wait_for(lambda: d.log().count("calibrate: ") >= 3, "another calibration")
    d.ctl_ok("unload", "layers")
    equal(proc.wait(60), 3, "status of a calibration whose model was unloaded")
    check("a model that it measures is being unloaded" in d.log(), d.log()[-500:])
    check(not os.path.exists(env.path("other")) and not os.path.exists(env.path("other.new")), "a file of half a calibration")

    # Nor does the daemon's end wait for it.
    proc = env.spawn(env.program("exl3ctl"), "--socket", d.sock, "calibrate", "-o", env.path("other"))
    wait_for(lambda: d.log().count("calibrate: ") >= 5, "a third calibration")
    began = time.monotonic()
    equal(d.stop(), 0, "status of a daemon that was stopped")
    check(time.monotonic() - began < 20, "the daemon's end waits for a calibration")
    check(proc.wait(60) != 0, "a calibration without a daemon")


def test_deterministic_bits(env):
    """Each row count has another kernel: a request's bits are those of its own, whoever is in its launch."""
    d = env.daemon(("tiny-llama",))
    lines = calibrate(env, d, "tiny-llama")
    shape = d.json("kernels", "tiny-llama", "model.layers.0.self_attn.q_proj")["shape"]
    d.stop()
    kernels = (("1 1", "linear_c"), ("2 2", "linear_ref"), ("5 7", "linear_c"), ("8 8192", "linear_ref"))
    table = write(env, "t", [line for line in lines if not line.startswith("linear ")] +
                  [f"linear {shape} {rows} {kernel}" for rows, kernel in kernels])
    requests, merged = meet(env, "--kernel-table", table)
    check(merged > 0, f"none of {requests} requests was in a launch with others")
