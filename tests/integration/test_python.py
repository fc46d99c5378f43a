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


def python(env, script, *args):
    """Runs a script of this folder with the modules of client/python: (status, stdout, stderr)."""
    library = os.path.abspath(env.program("libexl3.so"))
    with open(library, "rb") as f:
        if b"__asan_init" in (blob := f.read()) or b"__tsan_init" in blob:
            raise Skipped("a library built with a sanitizer cannot be loaded into python")
    paths = os.pathsep.join([HERE, os.path.join(HERE, "..", "..", "client", "python")])
    return env.run(sys.executable, "-B", os.path.join(HERE, script), *args,
                   env={**os.environ, "PYTHONPATH": paths, "EXL3_LIBRARY": library})


def against(env, d):
    rc, out, err = python(env, "python_client.py", d.sock)
    equal(rc, 0, f"status ({err.strip()})")
    got = json.loads(out)
    equal(got["module"], [256, 384, 1, [{"k": 256, "n": 384, "bits": 4, "codebook": 2, "bias": False}]], "module")
    matrix = ref.Matrix(layers(env), "k4.mul1")
    near(got["linear"], [v for r in ref.rows_of(got["x"], 256) for v in matrix.apply(r)], "f4", "linear")
    equal(got["rows"], 0, "result")
    check(got["plan"] is True and got["plan stream"] and got["plan freed"] and "of its own" in got["plan deadline"], f"plans: {got}")
    check(got["refused leaves nothing"], "a call with an unknown option was run by the next one")
    check(got["in order"] and got["nothing left"], f"asynchronous: {got}")
    check(got["rows of one's own"] and got["wider ones"] and got["rows again"], "exl3_host.Rows gives other bits")
    check("gives rows of 1536" in got["cut"], f"exl3_host.Rows, bytes that are no rows: {got['cut']}")
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


def test_pytorch_on_the_cpu(env):
    """Linear as a module, and tiny-llama of Transformers with the daemon's layers: its logits."""
    rc, out, err = python(env, "python_torch.py", env.shared().sock, env.model("tiny-llama"))
    if rc == 77:
        raise Skipped(out.strip())
    equal((rc, out.strip().split("\n")[-1]), (0, "ok"), f"python_torch.py ({err.strip()[-800:]})")
    for line in out.splitlines():
        if line.startswith("skipped"):
            raise Skipped(f"the modules passed; {line[9:]}")
