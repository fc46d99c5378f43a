# SPDX-License-Identifier: Apache-2.0
"""Every verb of exl3ctl: text, --json, exit statuses."""
import json
import os
import signal
import subprocess
import time

import exl3ref as ref
from harness import Skipped, WAIT, check, equal, wait_for


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


def models_of(reply):
    return reply["models"] if isinstance(reply, dict) else reply


def test_models(env):
    d = env.shared()
    by_name = {m["name"]: m for m in models_of(d.json("models"))}
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


def modules_of(reply):
    return reply["modules"] if isinstance(reply, dict) else reply


def test_modules(env):
    d = env.shared()
    modules = {(m["name"], m["kind"]): m for m in modules_of(d.json("modules", "layers"))}
    singles = [m for (name, _), m in modules.items() if name.startswith("k")]
    equal(len(singles), 24, "single layers")
    for bits in range(1, 9):
        for i, kind in enumerate(ref.NAMES):
            m = next(m for m in singles if m["name"] == f"k{bits}.{kind}")
            equal((m["k"], m["n"]), (256, 384), m["name"])
            shard = m["shards"][0]
            equal((shard["rate2"], shard["codebook"]), (2 * bits, i), f"{m['name']}: bitrate and codebook")
    names = {m["name"]: m for m in modules_of(d.json("modules", "tiny-deepseek"))}
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


def test_ps(env):
    d = env.shared()
    client = env.spawn(env.program("examples/tiny_llama"), "--socket", d.sock, "generate", "--prompt", "The", "--tokens",
                       "480", "--temperature", "1", "--label", "shown by ps", stdout=subprocess.PIPE,
                       stderr=subprocess.DEVNULL)
    client.stdout.read(20)
    reply = d.json("ps")
    clients = reply["clients"] if isinstance(reply, dict) else reply
    mine = [c for c in clients if c["pid"] == client.pid]
    equal(len(mine), 1, f"clients with pid {client.pid} in {clients}")
    c = mine[0]
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
                 ("run", "moe", "m", "p", "x.npy", "-o", "y.npy"), ("--socket",)):
        rc, out, err = env.run(program, *args)
        check(rc == 2 and err.strip(), f"exl3ctl {' '.join(args)}: status {rc}, {out}{err}")
    rc, out, _ = env.run(program, "--help")
    check(rc == 0 and "resolve" in out, f"--help: status {rc}")


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
    reply = json.loads(d.ctl_ok("ps", "--json"))
    clients = reply["clients"] if isinstance(reply, dict) else reply
    return any(c["channels"] for c in clients)


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
