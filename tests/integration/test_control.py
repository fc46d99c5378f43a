# SPDX-License-Identifier: Apache-2.0
"""Every verb of exl3ctl: text, --json, exit statuses."""
import os
import re
import shutil
import signal
import subprocess
import time

import exl3ref as ref
from harness import Skipped, TESTS, WAIT, check, equal, wait_for
from test_linear import near, wave


def test_status(env):
    d = env.shared()
    s = d.status()
    for key in ("daemon_version", "state", "uptime_ms", "backend", "device_name", "weight_bytes", "clients", "channels",
                "requests", "errors", "threads", "models", "worker_pid", "supervisor_pid"):
        check(key in s, f"status --json has no {key}: {sorted(s)}")
    equal(s["state"], "serving", "state")
    equal(s["backend"], env.backend, "backend")
    equal(s["supervisor_pid"], d.proc.pid, "supervisor")
    check(os.path.exists(f"/proc/{s['worker_pid']}"), "worker_pid is no process")
    equal(sum(m["weight_bytes"] for m in s["models"]) <= s["weight_bytes"], True, "weight bytes of the models")
    text = d.ctl_ok("status")
    for word in ("serving", "tiny-llama", "tiny-deepseek", "layers"):
        check(word in text, f"status does not say {word}: {text}")


def test_models(env):
    d = env.shared()
    by_name = {m["name"]: m for m in d.json("models")["models"]}
    equal(sorted(by_name), ["layers", "tiny-deepseek", "tiny-llama"], "models")
    for name, m in by_name.items():
        equal(m["state"], "ready", name)
        equal(os.path.realpath(m["path"]), os.path.realpath(env.model(name)), f"{name}: path")
        check(len(m["fingerprint"]) >= 32 and int(m["fingerprint"], 16), f"{name}: fingerprint {m['fingerprint']}")
        check(m["weight_bytes"] > 0 and m["nr_modules"] > 0, f"{name}: {m}")
    # Trellis, suh, svh of every matrix, and nothing else, is what the weights weigh.
    for name, files in (("layers", ["layers.safetensors"]), ("tiny-llama", ["model.safetensors"])):
        tensors = ref.load(*(os.path.join(env.model(name), f) for f in files))
        want = sum(len(t.data) for n, t in tensors.items() if n.rsplit(".", 1)[1] in ("trellis", "suh", "svh"))
        equal(by_name[name]["weight_bytes"], want, f"{name}: weight bytes")
    text = d.ctl_ok("models")
    check(all(name in text for name in by_name), f"models: {text}")


def test_modules(env):
    d = env.shared()
    modules = {(m["name"], m["kind"]): m for m in d.json("modules", "layers")["modules"]}
    singles = [m for (name, _), m in modules.items() if name.startswith("k")]
    equal(len(singles), 24, "single layers")
    for bits in range(1, 9):
        for i, kind in enumerate(ref.NAMES):
            m = next(m for m in singles if m["name"] == f"k{bits}.{kind}")
            equal((m["k"], m["n"]), (256, 384), m["name"])
            shard = m["shards"][0]
            equal((shard["rate2"], shard["codebook"]), (2 * bits, i), f"{m['name']}: bitrate and codebook")
    names = {m["name"]: m for m in d.json("modules", "tiny-deepseek")["modules"]}
    padded = names["model.layers.0.self_attn.kv_a_proj_with_mqa"]
    equal((padded["n"], padded["n_logical"]), (256, 160), "padded module: both sizes")
    text = d.ctl_ok("modules", "tiny-deepseek")
    check("160" in text and "256" in text and "experts" in text, f"modules: {text[:2000]}")
    rc, _, err = d.ctl("modules", "nonesuch")
    equal(rc, 3, "modules of no model")
    check("nonesuch" in err, f"the message does not name the model: {err}")


def test_resolve(env):
    d = env.shared()
    text = d.ctl_ok("resolve", "tiny-llama", "model.layers.0.self_attn.qkv_proj")
    for part in ("q_proj", "k_proj", "v_proj"):
        check(part in text, f"resolve does not name {part}: {text}")
    # Another prefix means the same module.
    d.ctl_ok("resolve", "tiny-llama", "language_model.model.layers.0.self_attn.o_proj")
    rc, out, err = d.ctl("resolve", "tiny-llama", "model.layers.0.self_attn.o_prog")
    equal(rc, 3, "resolve of no module")
    check("o_proj" in out + err, f"nothing near is named: {out}{err}")


def test_version(env):
    d = env.shared()
    text = d.ctl_ok("version")
    check(d.status()["daemon_version"] in text, f"version: {text}")
    rc, out, err = env.run(env.program("exl3ctl"), "--socket", "/nonexistent", "version", "--client")
    check(rc == 0 and out.strip(), f"version --client without a daemon: {rc} {out}{err}")


def test_tensors(env):
    d = env.shared()
    listed = {t["name"]: t for t in d.json("tensors", "tiny-deepseek")["tensors"]}
    folder = env.model("tiny-deepseek")
    files = ref.load(*(os.path.join(folder, f"model-0000{i}-of-00002.safetensors") for i in (1, 2)))
    quantized = ("trellis", "suh", "svh", "mul1", "mcg")
    want = {n: t for n, t in files.items() if n.rsplit(".", 1)[1] not in quantized}
    equal(sorted(listed), sorted(want), "tensors that are not quantized")
    for name, t in want.items():
        got = listed[name]
        equal((got["dtype"], [int(v) for v in got["shape"]], int(got["bytes"])), (t.dtype, t.shape, len(t.data)), name)


def test_kernels(env):
    """Each kernel for linear layers that can run here gives the same layer."""
    d = env.shared()
    names = [k for k in d.json("kernels")["names"] if not k.startswith(("ref", "moe", "mlp", "mla"))]
    check(len(names) >= 2, f"kernels: {names}")
    matrix = ref.Matrix(ref.load(os.path.join(env.model("layers"), "layers.safetensors")), "k3.3inst")
    x = wave(5 * 256, 15)
    ref.npy_save(env.path("kx.npy"), "<f4", (5, 256), x)
    ran = 0
    for name in names:
        rc, _, err = d.ctl("run", "linear", "layers", "k3.3inst", env.path("kx.npy"), "-o", env.path("ky.npy"),
                           "--kernel", name)
        check(rc in (0, 3), f"--kernel {name}: status {rc}, {err}")
        if rc == 0:
            near(ref.npy_load(env.path("ky.npy"))[2], [v for r in ref.rows_of(x, 256) for v in matrix.apply(r)], "f4", name)
            ran += 1
    check(ran >= 2, f"only {ran} of {names} ran")
    rc, _, err = d.ctl("run", "linear", "layers", "k3.3inst", env.path("kx.npy"), "-o", env.path("ky.npy"), "--kernel",
                       "nonesuch")
    check(rc in (2, 3) and "nonesuch" in err, f"--kernel nonesuch: status {rc}, {err}")


def test_doctor(env):
    """Finds nothing wrong with a daemon that serves; says so when there is none."""
    d = env.shared()
    rc, out, err = d.ctl("doctor")
    check(rc == 0 and out.strip(), f"doctor: status {rc}, {out}{err}")
    rc, out, err = env.run(env.program("exl3ctl"), "--socket", "/nonexistent/socket", "doctor")
    check(rc != 0 and "/nonexistent" in out + err, f"doctor without a daemon: status {rc}, {out}{err}")


def test_top(env):
    d = env.shared()
    out = d.ctl_ok("top", "--interval", "0.2", "--count", "2")
    check(len(out.splitlines()) >= 2, f"top: {out}")


def test_ps(env):
    d = env.shared()
    client = env.spawn(env.program("examples/tiny_llama"), "--socket", d.sock, "generate", "--prompt", "The", "--tokens",
                       "480", "--temperature", "1", "--label", "shown by ps", stdout=subprocess.DEVNULL,
                       stderr=subprocess.DEVNULL)

    def mine():
        return [c for c in d.json("ps")["clients"] if c["pid"] == client.pid and c["requests"]]
    wait_for(mine, "a client that has sent requests")
    equal(len(mine()), 1, f"clients with pid {client.pid}")
    c = mine()[0]
    equal((c["name"], c["uid"], c["channels"]), ("shown by ps", os.getuid(), 1), "ps")
    check(c["requests"] > 0 and c["rows"] > 0 and c["arena_bytes"] > 0 and c["errors"] == 0, f"ps: {c}")
    check("shown by ps" in d.ctl_ok("ps"), "ps does not show the client's name")
    client.kill()
    client.wait()
    wait_for(lambda: str(client.pid) not in d.ctl_ok("ps").split(), "the client to leave ps")


def test_usage(env):
    program = env.program("exl3ctl")
    for args in ((), ("nonesuch",), ("--nonesuch",), ("run",), ("run", "nonesuch"), ("load",), ("load", "no-directory"),
                 ("status", "surplus"), ("modules",), ("run", "linear", "a"), ("run", "mla"),
                 ("run", "moe", "m", "p", "x.npy", "-o", "y.npy"), ("--socket",),
                 ("run", "linear", "m", "p", "x.npy", "-o", "y.npy", "--lse", "l.npy"),
                 ("run", "mlp", "m", "p", "x.npy", "-o", "y.npy", "--routed-scale", "2")):
        rc, out, err = env.run(program, *args)
        check(rc == 2 and err.strip(), f"exl3ctl {' '.join(args)}: status {rc}, {out}{err}")
    rc, out, _ = env.run(program, "--help")
    check(rc == 0 and "resolve" in out, f"--help: status {rc}")


def test_help(env):
    """One form for every verb: usage, a sentence, each option with what it takes, exit status; by help and by --help."""
    program = env.program("exl3ctl")
    rc, overview, _ = env.run(program, "help")
    equal(rc, 0, "help")
    equal(env.run(program, "--help")[1], overview, "--help and help")
    verbs = re.findall(r"^  ([a-z]+) ", overview, re.M)
    check(len(verbs) > 15 and "help" in verbs, f"verbs: {verbs}")
    for verb in verbs:
        rc, out, err = env.run(program, "help", verb)
        equal((rc, err), (0, ""), f"help {verb}")
        for shape in (rf"\Ausage: exl3ctl \[OPTION\]\.\.\. {verb}\b", rf"\n\n{verb}: \S.*[^.]\.\n\n", r"\n  --socket PATH +\S",
                      r"\nExit status: 0 done, 1 .* 2 usage, 3 .* 4 .* 5 "):
            check(re.search(shape, out), f"help {verb} has no {shape!r}: {out}")
        equal(env.run(program, verb, "--help")[1], out, f"{verb} --help")
        takes_json = "\n  --json" in out
        rc, _, err = env.run(program, "--socket", "/nonexistent/socket", verb, *re.findall("[A-Z]{4,}", out.split("\n")[0])[1:],
                             "--json")
        check(takes_json or (rc == 2 and f"{verb} does not take --json; see exl3ctl help {verb}" in err),
              f"{verb} --json: status {rc}, {err}")
    for args, hint in ((("statsu",), "there is no verb 'statsu' (did you mean status?)"),
                       (("help", "unlaod"), "(did you mean unload?)"), (("xyzzy",), "there is no verb 'xyzzy';"),
                       (("status", "--jsn"), "there is no option '--jsn' (did you mean --json?)"),
                       (("status", "--xyzzy"), "there is no option '--xyzzy';"), (("status", "-x"), "no option '-x'"),
                       (("--json=1", "status"), "--json takes no value"), (("--k=1", "run"), "stands for several options"),
                       (("--socket",), "--socket needs a value"),
                       (("resolve", "a"), "resolve: 1 argument is given; see exl3ctl help resolve")):
        rc, out, err = env.run(program, *args)
        check(rc == 2 and hint in err and out == "", f"exl3ctl {' '.join(args)}: status {rc}, {out}{err}")


def test_completion(env):
    """What bash offers: verbs, options of the verb, models of the daemon that the line names."""
    if not shutil.which("bash"):
        raise Skipped("bash is not installed")
    d = env.shared()
    script = os.path.join(os.path.dirname(TESTS), "client", "exl3ctl.bash")
    program = env.program("exl3ctl")

    def offered(*words):
        rc, out, err = env.run("bash", "-c", 'source "$1"; shift; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _exl3ctl; '
                               'printf "%s\\n" "${COMPREPLY[@]}"', "bash", script, program, *words)
        equal((rc, err), (0, ""), f"completion of {words}")
        return out.split()
    equal(offered("st"), ["status"], "a verb")
    check({"load", "unload", "help"} <= set(offered("")), "verbs")
    equal(offered("help", "dra"), ["drain"], "a verb after help")
    equal(offered("load", "--no"), ["--no-wait", "--node"], "options of a verb")
    equal(offered("--s"), ["--socket"], "options of all verbs")
    equal(offered("run", "m"), ["mlp", "moe", "mla"], "operations")
    equal(sorted(offered("--socket", d.sock, "modules", "tiny-")), ["tiny-deepseek", "tiny-llama"], "models")
    equal(offered("--socket", d.sock, "run", "linear", "la"), ["layers"], "models of run")
    equal(offered("--socket", "/nonexistent/socket", "modules", ""), [], "models without a daemon")
    equal(offered("--socket", ""), [], "a path is left to bash")
    # A name is text, whatever a shell would make of it.
    trap = env.path("trap")
    with open(trap, "w") as f:
        f.write(f"#!/bin/sh\necho models:\necho '  $(touch${{IFS}}{trap}.sprung) ready'\n")
    os.chmod(trap, 0o755)
    program = trap
    equal(offered("modules", "$"), [f"$(touch${{IFS}}{trap}.sprung)"], "an odd name")
    check(not os.path.exists(trap + ".sprung"), "completion ran what a model's name says")


def test_socket_choice(env):
    d = env.shared()
    program = env.program("exl3ctl")
    clean = {k: v for k, v in os.environ.items() if k != "EXL3_SOCKET"}
    rc, _, err = env.run(program, "status", env=dict(clean, EXL3_SOCKET=d.sock))
    equal(rc, 0, f"$EXL3_SOCKET ({err.strip()})")
    rc, _, err = env.run(program, "--socket", d.sock, "status", env=dict(clean, EXL3_SOCKET="/nonexistent"))
    equal(rc, 0, f"--socket before $EXL3_SOCKET ({err.strip()})")
    rc, _, err = env.run(program, "--socket", "/nonexistent/socket", "status")
    equal(rc, 4, "no daemon")
    check("/nonexistent/socket" in err, f"the message does not name the socket: {err}")
    if not os.path.exists("/run/exl3-daemon/0.sock"):
        rc, _, err = env.run(program, "status", env=clean)
        equal(rc, 4, "no daemon at the default socket")
        check("/run/exl3-daemon/0.sock" in err, f"the default socket is not named: {err}")


def test_unwritable_output(env):
    d = env.shared()
    ref.npy_save(env.path("x.npy"), "<f4", (1, 256), [0.0] * 256)
    rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", env.path("x.npy"), "-o", "/nonexistent/y.npy")
    equal(rc, 1, "output in no directory")
    check("/nonexistent/y.npy" in err, f"the message does not name the file: {err}")


def test_interrupted(env):
    """Status 5 on Ctrl-C while the daemon works: it is stopped in the middle of a request."""
    d = env.daemon((f"layers={env.model('layers')}",))
    worker = d.worker_pid()
    ref.npy_save(env.path("x.npy"), "<f4", (8192, 256), [0.25] * (8192 * 256))
    for _ in range(20):  # until one is caught before its answer
        proc = env.spawn(env.program("exl3ctl"), "--socket", d.sock, "run", "linear", "layers", "k4.mul1",
                         env.path("x.npy"), "-o", env.path("y.npy"), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                         text=True)
        wait_for(lambda: has_channel(d) or proc.poll() is not None, "exl3ctl to send its request")
        os.kill(worker, signal.SIGSTOP)
        try:
            time.sleep(0.3)
            if proc.poll() is not None:
                continue
            proc.send_signal(signal.SIGINT)
            _, err = proc.communicate(timeout=WAIT)
            equal(proc.returncode, 5, f"status after Ctrl-C ({err.strip()})")
            break
        finally:
            os.kill(worker, signal.SIGCONT)
    else:
        check(False, "every request was answered before Ctrl-C")
    wait_for(lambda: d.status()["channels"] == 0, "the channel of the interrupted exl3ctl to go")


def test_daemon_dies_during_a_request(env):
    """Status 5 and a sentence."""
    d = env.daemon((f"layers={env.model('layers')}",))
    os.kill(d.worker_pid(), signal.SIGSTOP)
    proc = env.spawn(env.program("exl3ctl"), "--socket", d.sock, "status", stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                     text=True)
    time.sleep(0.3)
    d.kill()
    _, err = proc.communicate(timeout=WAIT)
    check(proc.returncode in (4, 5) and err.strip(), f"the daemon died: status {proc.returncode}, {err}")


def has_channel(d):
    return any(c["channels"] for c in d.json("ps")["clients"])


def test_only_administrators_change(env):
    """Another user may look and compute, but not load, unload or drain."""
    if os.getuid() != 0:
        raise Skipped("needs root to become another user")
    d = env.daemon((f"layers={env.model('layers')}",))
    os.chmod(env.tmp, 0o755)
    os.chmod(d.sock, 0o666)
    ref.npy_save(env.path("x.npy"), "<f4", (1, 256), [0.5] * 256)
    os.chmod(env.path("x.npy"), 0o644)

    def as_nobody(*args):
        return d.ctl(*args, user=65534, group=65534, extra_groups=[])
    rc, _, err = as_nobody("status")
    equal(rc, 0, f"status as nobody ({err.strip()})")
    for args in (("load", f"more={env.model('tiny-llama')}"), ("unload", "layers"), ("drain",)):
        rc, _, err = as_nobody(*args)
        equal(rc, 3, f"{args[0]} as nobody ({err.strip()})")
    rc, _, err = as_nobody("run", "linear", "layers", "k4.mul1", env.path("x.npy"), "-o", "/dev/null")
    equal(rc, 0, f"run as nobody ({err.strip()})")
    equal(d.status()["state"], "serving", "state")
