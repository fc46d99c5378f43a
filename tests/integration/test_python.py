# SPDX-License-Identifier: Apache-2.0
"""client/python/exl3.py against the real daemon, in a process of its own."""
import json
import os
import sys

import exl3ref as ref
from harness import HERE, Skipped, check, equal
from test_linear import layers, near


def test_python_client(env):
    against(env, env.shared())


def test_python_client_slices(env):
    """The same where a launch has one row: queries that share a block table are then in different launches."""
    against(env, env.daemon([f"{m}={env.model(m)}" for m in ("layers", "tiny-deepseek")], ["--chunk-us", "1"]))


def against(env, d):
    library = os.path.abspath(env.program("libexl3.so"))
    with open(library, "rb") as f:
        if b"__asan_init" in (blob := f.read()) or b"__tsan_init" in blob:
            raise Skipped("a library built with a sanitizer cannot be loaded into python")
    paths = os.pathsep.join([HERE, os.path.join(HERE, "..", "..", "client", "python")])
    rc, out, err = env.run(sys.executable, "-B", os.path.join(HERE, "python_client.py"), d.sock,
                           env={**os.environ, "PYTHONPATH": paths, "EXL3_LIBRARY": library})
    equal(rc, 0, f"status ({err.strip()})")
    got = json.loads(out)
    equal(got["module"], [256, 384, 1, [{"k": 256, "n": 384, "bits": 4, "codebook": 2, "bias": False}]], "module")
    matrix = ref.Matrix(layers(env), "k4.mul1")
    near(got["linear"], [v for r in ref.rows_of(got["x"], 256) for v in matrix.apply(r)], "f4", "linear")
    equal(got["rows"], 0, "result")
    check(got["in order"] and got["nothing left"], f"asynchronous: {got}")
    check(got["waits"] and got["stream"] and got["stream order"], f"stream calls: {got}")
    equal(got["stream late"], [-62, [62, got["stream late"][2]], got["stream late"][2]], "a stream call that is late")
    equal(got["no module"][0], "ENOENT", "a module that is not there")
    check("nonesuch" in got["no model"][1], f"the sentence: {got['no model']}")
    equal(got["deadline"][0], "ETIME", "a deadline that has passed")
    check("256" in got["shapes"], f"x and y exchanged: {got['shapes']}")
    equal(got["tensor"][0], "F32", "tensor: type")
    check(got["tensor"][2] == 4 * got["tensor"][1][0] * got["tensor"][1][1] and got["tensor"][3],
          f"tensor: {got['tensor']}")
    equal(got["moe"], [256, 256, 16], "routed block")
    equal((got["skipped"], got["all holes"]), (2, False), "invalid ids, y of a row without experts")
    pages = got["pages"]
    cache, q = ref.rows_of(pages["cache"], 32), ref.rows_of(pages["q"], 32)
    want = []
    for b, (table, length) in enumerate([([5, 0, 3], 9), ([5, 0, 3], 10), ([5, 0, 3], 11), ([1, 77, -1], 11)]):
        slots = [page * 4 + i if 0 <= page < 6 else -1 for page in table for i in range(4)][:length]
        want += sum(ref.mla(q[2 * b:2 * b + 2], cache, slots, 0.5, 16)[0], [])
    near(pages["o"], want, "f4", "block tables with lengths")
    equal(pages["detail"], 2, "a page that is not there, a length that is too large")
    equal(got["pages that are not whole"][0], "EINVAL", "slots that are no multiple of the page")
    check(got["alive"], "not alive while connected")
    equal(got["closed"][0], "EBADF", "after close")
