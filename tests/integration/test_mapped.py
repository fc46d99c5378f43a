# SPDX-License-Identifier: Apache-2.0
"""Mapped mode: a client that runs its requests itself, with the daemon's weights: same bits, who may, and what ends it."""
import errno
import json
import os
import re
import shutil
import signal
import subprocess
import sys

import test_metrics
from harness import HERE, WAIT, Failed, Skipped, check, equal, wait_for

MODEL, MODULE = "tiny-llama", "model.layers.0.mlp.down_proj"
STEPS = (f"open:{MODEL}", f"module:{MODULE}", "channel", "call")


def mapped_daemon(env, policy="allow", models=(MODEL,), args=(), **kw):
    conf = env.path("mapped.conf")
    with open(conf, "w") as f:
        f.write(f"[tenant default]\nmapped = {policy}\n")
    return env.daemon(models, ["--config", conf, *args], **kw), conf


def environ(env, **more):
    return {**os.environ, "EXL3_BACKEND_DIR": env.build, "EXL3_THREADS": "2", **more}


def lines_of(out):
    """[(step, result, text)]"""
    return [(p[0], int(p[1]), p[2]) for p in ((line + " ").split(" ", 2) for line in out.splitlines()) if len(p) == 3 and p[0] != "holding"]


def say(env, d, mode, *steps, stdin="", status=0, timeout=200, environment=None):
    proc = env.spawn(env.program("tests/integration/mapped"), d.sock, mode, *steps, env=environment or environ(env),
                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    out, err = proc.communicate(stdin, timeout=timeout)
    equal(proc.returncode, status, f"mapped {mode} {steps}: {err.strip()}")
    return [(s, r, t.strip()) for s, r, t in lines_of(out)]


class Held:
    """A client that stands still at each step "pause"."""

    def __init__(self, env, d, mode, *steps):
        self.proc = env.spawn(env.program("tests/integration/mapped"), d.sock, mode, *steps, env=environ(env),
                              stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def until_pause(self):
        told = []
        while True:
            line = self.proc.stdout.readline()
            if not line:
                raise Failed(f"mapped: {told} {self.proc.stderr.read().strip()}")
            if line.strip() == "holding":
                return told
            told += [(s, r, t.strip()) for s, r, t in lines_of(line)]

    def go(self):
        self.proc.stdin.write("\n")
        self.proc.stdin.flush()

    def end(self):
        out, err = self.proc.communicate("\n", timeout=WAIT)
        equal(self.proc.returncode, 0, f"status ({err.strip()})")
        return [(s, r, t.strip()) for s, r, t in lines_of(out)]


def mappers(d, model=MODEL):
    return sum(m.get("mappers", 0) for m in d.status()["models"] if m["name"] == model)


def client_of(d, pid):
    found = [c for c in d.json("ps")["clients"] if c["pid"] == pid]
    check(len(found) == 1, f"client {pid} in ps: {found}")
    return found[0]


def next_worker(d, first):
    """Until another one than @first has all models."""
    def there():
        rc, out, _ = d.ctl("status", "--json")
        status = json.loads(out) if rc == 0 else {}
        return status.get("worker_pid", first) != first and [m["state"] for m in status["models"]] == ["ready"]
    wait_for(there, "the next worker")


def call_of(told):
    """(result, bits of y) of the last call."""
    step = [t for t in told if t[0] == "call"][-1]
    return step[1], step[2].split()[1]


def test_same_bits(env):
    """Every module of the test models, with all types: what a mapped channel computes is what the daemon does."""
    models = ("tiny-llama", "tiny-deepseek", "layers")
    d, _ = mapped_daemon(env, models=models)
    kinds = {"linear": 1, "moe": 2, "mlp": 3}
    for model in models:
        listed = d.json("modules", model)["modules"]
        wanted = [m for m in listed if ".experts." not in m["name"]][:: 4 if env.short else 1]
        check({m["kind"] for m in wanted} & {"linear"}, f"modules of {model}: {listed[:2]}")
        names = "".join(f"{m['name']} {kinds[m['kind']]}\n" for m in wanted)
        told = say(env, d, "mapped", f"open:{model}", "compare", stdin=names)
        equal(told[-1][:2], ("compare", 9 * len(wanted)), f"calls of {model} that were equal")
    told = say(env, d, "mapped", "open:tiny-deepseek", "mla")
    equal(told[-1][:2], ("mla", 9), "attention that was equal")
    equal(d.stop(), 0, "status after SIGTERM")


def test_wrong_entries(env):
    """What the daemon refuses is refused with the same result and detail."""
    d, _ = mapped_daemon(env)
    told = say(env, d, "mapped", *STEPS, "wrong", "process")
    equal(told[-2][:2], ("wrong", 22), "entries that were refused alike")
    equal(told[-1][:2], ("process", 0), "operands in memory of the process")
    told = say(env, d, "direct", *STEPS, "process")
    equal(told[-1][1], -22, "the same in direct mode")


def test_policy(env):
    """Who may: nobody unless the tenant says so, then who asks, or who does not object."""
    for policy, auto, asked in (("off", 0, -1), ("no", 0, -1), ("allow", 0, 1), ("yes", 0, 1), ("prefer", 1, 1)):
        d, _ = mapped_daemon(env, policy)
        equal(say(env, d, "auto", *STEPS)[2][1], auto, f"mapped = {policy}: auto")
        told = say(env, d, "mapped", *STEPS[:3])
        equal(told[2][1], asked, f"mapped = {policy}: mapped")
        if asked < 0:
            check("(mapped)" in told[2][2], f"the sentence: {told[2]}")
        equal(say(env, d, "direct", *STEPS)[2][1], 0, f"mapped = {policy}: direct")
        told = say(env, d, "auto", *STEPS[:3], environment=environ(env, EXL3_MODE="mapped"))
        equal(told[2][1], asked, f"mapped = {policy}: EXL3_MODE=mapped")
        equal(mappers(d), 0, "mappers left")
        equal(d.stop(), 0, "status after SIGTERM")
    rc, _, err = env.run(env.program("tests/integration/mapped"), d.sock, "auto", env=environ(env, EXL3_MODE="fast"))
    check(rc == 1 and "EXL3_MODE is 'fast'" in err, f"an unknown mode: {rc}, {err.strip()}")


def test_falls_back(env):
    """Where it is preferred and cannot be, calls go through rings, and both sides know why."""
    d, _ = mapped_daemon(env, "prefer")
    empty = env.path("empty")
    os.mkdir(empty)
    without = {k: v for k, v in environ(env).items() if k not in ("LD_LIBRARY_PATH", "EXL3_BACKEND_DIR")}
    told = say(env, d, "auto", *STEPS, environment=without)
    equal(told[2][1], 0, "a channel without the library")
    check("libexl3-mapped.so" in told[2][2], f"why: {told[2]}")
    equal(told[3][1], 0, "its call")
    proc = env.spawn(env.program("tests/integration/mapped"), d.sock, "auto", *STEPS, "pause", env=without,
                     stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    while "holding" not in proc.stdout.readline():
        pass
    c = client_of(d, proc.pid)
    check(c["mode"] == "direct" and "libexl3-mapped.so" in c["mode_note"], f"ps: {c}")
    check("not mapped: " in d.ctl_ok("ps"), "ps for people")
    proc.communicate("\n", timeout=WAIT)
    told = say(env, d, "mapped", *STEPS[:3], environment=without)
    check(told[2][1] == -95, f"one that must be mapped: {told[2]}")


def test_counted(env):
    """The daemon knows who maps what; whoever dies is no longer counted, and leaves nothing behind."""
    d, _ = mapped_daemon(env)
    want = call_of(say(env, d, "direct", *STEPS))
    before = d.settled()
    clients = [Held(env, d, "mapped", *STEPS, "pause", "call", "pause") for _ in range(2)]
    for c in clients:
        equal(call_of(c.until_pause()), want, "the call")
    equal(mappers(d), 2, "mappers")
    for c in clients:
        p = client_of(d, c.proc.pid)
        equal((p["mode"], p["mapped"], p.get("channels", 0)), ("mapped", 1, 0), "in ps")
    check("mapped by 2" in d.ctl_ok("status") and "mapped:1" in d.ctl_ok("ps"), "for people")
    check(re.search(r'exl3_model_mappers\{model="tiny-llama"\} 2\b', test_metrics.fetch(d.sock + ".metrics")), "in the metrics")
    clients[0].proc.kill()
    clients[0].proc.wait(WAIT)
    wait_for(lambda: mappers(d) == 1, "one mapper left")
    clients[1].go()
    equal(call_of(clients[1].until_pause()), want, "the other one's call")
    clients[1].end()
    wait_for(lambda: mappers(d) == 0, "no mapper left")
    after = d.settled()
    # The table that was made for the first one stays with its model: a descriptor, and nothing that is mapped.
    table = {k: after["fds"].pop(k) for k in list(after["fds"]) if "exl3-map " in k}
    equal(sum(table.values()), 1, "tables of modules")
    equal(after, before, "what the daemon holds")


def test_unload_revokes(env):
    d, _ = mapped_daemon(env, models=(MODEL, "layers"))
    c = Held(env, d, "mapped", *STEPS, "pause", "call", "close", *STEPS, "pause")
    want = call_of(c.until_pause())
    idle = Held(env, d, "mapped", f"open:{MODEL}", "channel", "pause", "open:layers", "pause")
    idle.until_pause()
    equal(mappers(d), 2, "mappers")
    d.ctl_ok("unload", MODEL, timeout=WAIT)  # returns when both have let go
    check(MODEL not in [m["name"] for m in d.status()["models"]], "the model is still listed")
    equal((client_of(d, c.proc.pid)["mapped"], client_of(d, idle.proc.pid)["mapped"]), (0, 0), "mapped in ps")
    check("is to let go of the weights" in d.log(), "the log")
    d.ctl_ok("load", f"{MODEL}={env.model(MODEL)}")
    c.go()
    told = c.until_pause()
    equal(told[0][:2], ("call", -116), "a call with what was unloaded, though the name is there again")
    equal(told[0][2].split()[0], "11", "its detail")
    equal(call_of(told), want, "after it was opened again")
    equal(mappers(d), 1, "mappers of the new one")
    idle.go()
    equal(idle.until_pause()[0][:2], ("open", 0), "another model")
    idle.end()
    c.end()


def test_unload_waits(env):
    """--wait: mapped clients go on; a second unload does not wait."""
    d, _ = mapped_daemon(env)
    c = Held(env, d, "mapped", *STEPS, "pause", "call", "pause", "close", "pause")
    want = call_of(c.until_pause())
    waiting = env.spawn(env.program("exl3ctl"), "--socket", d.sock, "unload", "--wait", MODEL)
    wait_for(lambda: [m["state"] for m in d.status()["models"]] == ["unloading"], "unloading")
    c.go()
    equal(call_of(c.until_pause()), want, "a call meanwhile")
    equal(waiting.poll(), None, "unload --wait")
    told = say(env, d, "mapped", f"open:{MODEL}")
    equal(told[0][1], -2, "a newcomer")
    c.go()
    c.until_pause()
    equal(waiting.wait(WAIT), 0, "unload --wait when the mapper has gone")
    equal(d.status().get("models", []), [], "models")
    c.end()

    d.ctl_ok("load", f"{MODEL}={env.model(MODEL)}")
    c = Held(env, d, "mapped", *STEPS, "pause", "call", "pause")
    c.until_pause()
    waiting = env.spawn(env.program("exl3ctl"), "--socket", d.sock, "unload", "--wait", MODEL)
    wait_for(lambda: [m["state"] for m in d.status()["models"]] == ["unloading"], "unloading")
    d.ctl_ok("unload", MODEL, timeout=WAIT)
    equal(waiting.wait(WAIT), 0, "unload --wait when another one does not wait")
    c.go()
    equal(c.until_pause()[0][:2], ("call", -116), "a call after it")
    c.end()


def test_policy_withdrawn(env):
    d, conf = mapped_daemon(env)
    c = Held(env, d, "mapped", *STEPS, "pause", "call", "channel", "pause")
    c.until_pause()
    with open(conf, "w") as f:
        f.write("[tenant default]\nmapped = off\n")
    d.proc.send_signal(signal.SIGHUP)
    wait_for(lambda: mappers(d) == 0, "mappers after the reload")
    c.go()
    told = c.until_pause()
    equal(told[0][:2], ("call", -116), "a call")
    equal(told[1][1] < 0, True, f"another channel: {told[1]}")
    c.end()


def test_worker_killed(env):
    """Calls go on while there is no worker, and with the next one, which counts the client again."""
    d, _ = mapped_daemon(env)
    c = Held(env, d, "mapped", *STEPS, "pause", "call", "pause", "reconnect", "call", "memory", "pause")
    want = call_of(c.until_pause())
    slab = [line.split()[4] for line in open(f"/proc/{c.proc.pid}/maps") if "exl3-slab" in line]
    first = d.worker_pid()
    os.kill(first, signal.SIGSTOP)  # so that it cannot be replaced before we have asked
    os.kill(first, signal.SIGKILL)
    c.go()
    equal(call_of(c.until_pause()), want, "a call without a worker, or with another one")
    next_worker(d, first)
    c.go()
    told = c.until_pause()
    equal((told[0][:2], call_of(told)), (("reconnect", 0), want), "after the reconnection")
    check(d.worker_pid() != first, "it is the same worker")
    equal(mappers(d), 1, "mappers at the next worker")
    if env.backend == "cpu":
        check("adopted" in d.log(), "the weights were not adopted")
        now = [line.split()[4] for line in open(f"/proc/{c.proc.pid}/maps") if "exl3-slab" in line]
        equal(now, slab, "the client maps the slab that it had")
    c.end()
    wait_for(lambda: mappers(d) == 0, "no mapper left")


def test_worker_killed_without_adoption(env):
    """The next worker has read the files: the same content in other memory, which the client moves to."""
    d, _ = mapped_daemon(env, args=("--adopt", "never"))
    c = Held(env, d, "mapped", *STEPS, "pause", "reconnect", "call", "pause")
    want = call_of(c.until_pause())
    first = d.worker_pid()
    os.kill(first, signal.SIGKILL)
    next_worker(d, first)
    c.go()
    told = c.until_pause()
    equal(call_of(told), want, "after the reconnection")
    equal(mappers(d), 1, "mappers")
    equal(sum("exl3-slab" in line for line in open(f"/proc/{c.proc.pid}/maps")), 1, "slabs that the client maps")
    c.end()


def test_other_content(env):
    """The next worker has another model of that name: nothing of the old one is computed with any more."""
    folder = env.path("swapped")
    shutil.copytree(env.model(MODEL), folder)
    d, _ = mapped_daemon(env, models=(f"{MODEL}={folder}",), args=("--adopt", "never"))
    c = Held(env, d, "mapped", *STEPS, "pause", "reconnect", "call", "pause")
    c.until_pause()
    first = d.worker_pid()
    shutil.rmtree(folder)
    shutil.copytree(env.model("tiny-deepseek"), folder)
    os.kill(first, signal.SIGKILL)
    next_worker(d, first)
    c.go()
    told = c.until_pause()
    equal([t[:2] for t in told], [("reconnect", -116), ("call", -116)], "what it is told")
    c.end()
    equal(mappers(d), 0, "mappers")


def test_daemon_gone(env):
    """The daemon has ended for good: what is mapped stays good."""
    d, _ = mapped_daemon(env)
    c = Held(env, d, "mapped", *STEPS, "pause", "call", "pause")
    want = call_of(c.until_pause())
    equal(d.stop(), 0, "status after SIGTERM")
    c.go()
    equal(call_of(c.until_pause()), want, "a call without a daemon")
    c.end()


def test_one_copy(env):
    """Two clients that have used all of it hold the weights once between them."""
    if env.backend != "cpu":
        raise Skipped("weights in host memory only")
    d, _ = mapped_daemon(env)
    names = "".join(f"{m['name']} {dict(linear=1, moe=2, mlp=3)[m['kind']]}\n" for m in d.json("modules", MODEL)["modules"])
    clients = [Held(env, d, "mapped", f"open:{MODEL}", "compare", "pause", "memory", "pause") for _ in range(2)]
    for c in clients:
        c.proc.stdin.write(names + "\n")
        c.proc.stdin.flush()
    for c in clients:
        c.until_pause()
    for c in clients:
        c.go()
        step = [t for t in c.until_pause() if t[0] == "memory"][0]
        pss, rss = step[1], int(step[2])
        check(rss > 4000 and pss <= rss * 0.51, f"of {rss} KiB of weights its share is {pss} KiB")
    for c in clients:
        c.end()


def test_clients_of_direct_mode(env):
    """Programs that know nothing of it: the same outcomes with EXL3_MODE=mapped."""
    d, _ = mapped_daemon(env, models=("tiny-llama", "tiny-deepseek"))
    mode = environ(env, EXL3_MODE="mapped")
    commands = [("async", MODEL, MODULE, c) for c in ("order", "full", "deadline", "cancel", "closed", "small")]
    commands += [("stream", MODEL, MODULE, c) for c in ("calls", "order", "late", "wrap", "many")]
    commands += [("indices", "tiny-deepseek", "model.layers.1.mlp", "20")]
    for name, *args in commands:
        rc, out, err = env.run(env.program(f"tests/integration/{name}"), d.sock, *args, env=mode)
        equal(rc, 0, f"{name} {' '.join(args)} ({out.strip()} {err.strip()})")


def test_language_models(env):
    """The example programs: perplexity in mapped mode is that of direct mode, to the last digit."""
    d, _ = mapped_daemon(env, models=("tiny-llama", "tiny-deepseek"))
    text = os.path.join(HERE, "..", "models", "README.md")
    for program in ("tiny_llama", "tiny_deepseek"):
        seen = []
        for mode in ("direct", "mapped"):
            rc, out, err = env.run(env.program(f"examples/{program}"), "--socket", d.sock, "perplexity", "--text", text,
                                   "--windows", "1", env=environ(env, EXL3_MODE=mode))
            equal(rc, 0, f"{program} {mode} ({err.strip()})")
            seen.append(re.sub(r"seconds=\S+", "", out))
        equal(seen[1], seen[0], program)
        check("perplexity=" in seen[0], seen[0])


def test_python(env):
    """client/python/exl3.py in mapped mode, with NumPy arrays as operands where there is NumPy."""
    library = os.path.abspath(env.program("libexl3.so"))
    with open(library, "rb") as f:
        if b"__asan_init" in (blob := f.read()) or b"__tsan_init" in blob:
            raise Skipped("a library built with a sanitizer cannot be loaded into python")
    d, _ = mapped_daemon(env, models=("layers", "tiny-deepseek"))
    paths = os.pathsep.join([HERE, os.path.join(HERE, "..", "..", "client", "python")])
    outs = []
    for mode in ("direct", "mapped"):
        more = environ(env, EXL3_MODE=mode, PYTHONPATH=paths, EXL3_LIBRARY=library)
        rc, out, err = env.run(sys.executable, "-B", os.path.join(HERE, "python_client.py"), d.sock, env=more)
        equal(rc, 0, f"{mode}: status ({err.strip()})")
        outs.append(json.loads(out))
    equal(outs[1]["deadline"][0], "ETIME", "a deadline that has passed")
    equal(outs[1]["plan"], errno.errorcode[errno.EOPNOTSUPP], "a plan of a mapped channel")
    outs[1].update({k: v for k, v in outs[0].items() if k.startswith("plan")})
    equal({k: (v, outs[1][k]) for k, v in outs[0].items() if v != outs[1][k]}, {}, "what is other than in direct mode")
    code = ("import exl3, sys\n"
            "c = exl3.Client(sys.argv[1], mode='mapped')\n"
            "m = c.model('layers').module('k4.mul1')\n"
            "ch = c.channel()\n"
            "assert (ch.mode, ch.mode_reason, c.channel(mode='direct').mode) == ('mapped', '', 'direct')\n"
            "a = c.arena(1 << 20); x, y = a.array('f4', (1, m.k)), a.array('f4', (1, m.n))\n"
            "ch.linear(m, x, y)\n"
            "if exl3.numpy:\n"
            "    z = exl3.numpy.zeros((1, m.n), '<f4'); ch.linear(m, exl3.numpy.zeros((1, m.k), '<f4'), z)\n"
            "    assert (z == y.numpy if hasattr(y, 'numpy') else True) is not None\n")
    rc, _, err = env.run(sys.executable, "-B", "-c", code, d.sock, env=environ(env, PYTHONPATH=paths, EXL3_LIBRARY=library))
    equal(rc, 0, f"modes in Python ({err.strip()})")


def test_ctl_run(env):
    d, _ = mapped_daemon(env, models=("layers",))
    import exl3ref as ref
    x = env.path("x.npy")
    ref.npy_save(x, "<f4", (2, 256), [0.01 * i for i in range(512)])
    got = []
    for mode in ("direct", "mapped"):
        y = env.path(f"y-{mode}.npy")
        d.ctl_ok("run", "linear", "layers", "k4.mul1", x, "-o", y, "--mode", mode, env=environ(env))
        with open(y, "rb") as f:
            got.append(f.read())
    equal(got[1] == got[0], True, "the files of both modes")
    rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", x, "-o", x, "--mode", "fast")
    check(rc == 2 and "auto, direct or mapped" in err, f"an unknown mode: {rc} {err.strip()}")
