# SPDX-License-Identifier: Apache-2.0
"""Start, refusals, restart of the worker, load and unload, drain."""
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import time

import exl3ref as ref
from harness import MODELS, WAIT, check, equal, wait_for

LAYERS = "layers=" + os.path.join(MODELS, "layers")


def x_file(env, name="x.npy", k=256):
    ref.npy_save(env.path(name), "<f4", (1, k), [0.01 * i for i in range(k)])
    return env.path(name)


def linear_status(env, d, module="k4.mul1", model="layers"):
    """(status, message) of a request through a new process."""
    rc, _, err = d.ctl("run", "linear", model, module, x_file(env), "-o", env.path("y.npy"))
    return rc, err


def test_second_daemon_on_a_live_socket(env):
    d = env.daemon()
    second = env.daemon(sock=d.sock, wait=False)
    equal(second.wait_exit(), 1, "status of the second daemon")
    check(d.sock in second.log(), f"the second daemon does not name the socket: {second.log()}")
    d.ctl_ok("status")


def test_stale_socket_is_replaced(env):
    path = env.path("stale.sock")
    s = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    s.bind(path)
    s.close()
    check(os.path.exists(path), "no stale socket to test with")
    env.daemon(sock=path).ctl_ok("status")


def test_something_else_at_the_socket_path(env):
    """A file that is no socket is not ours to remove."""
    path = env.path("file.sock")
    with open(path, "w") as f:
        f.write("precious")
    d = env.daemon(sock=path, wait=False)
    equal(d.wait_exit(), 1, "status")
    with open(path) as f:
        equal(f.read(), "precious", "the file")


def test_folder_of_the_socket_is_missing(env):
    """A path with a slip of the pen makes no folder."""
    folder = env.path("no-such-folder")
    d = env.daemon(sock=os.path.join(folder, "d.sock"), wait=False)
    equal(d.wait_exit(), 1, "status")
    check(f"folder {folder}: No such file" in d.log(), f"the message does not name the folder: {d.log()}")
    check(not os.path.exists(folder), "the folder was made")


def test_socket_mode_and_removal(env):
    d = env.daemon()
    equal(oct(os.stat(d.sock).st_mode & 0o777), oct(0o660), "socket mode")
    equal(d.stop(), 0, "status after SIGTERM")
    check(not os.path.exists(d.sock), "the socket is left behind")
    rc, _, err = d.ctl("status")
    equal(rc, 4, "exl3ctl without a daemon")
    check(d.sock in err, f"the message does not name the socket: {err}")


def broken_checkpoints(env):
    """name -> (folder, words that the refusal must contain)."""
    out = {}

    def folder(name):
        path = env.path(f"broken-{name}")
        shutil.rmtree(path, ignore_errors=True)
        os.mkdir(path)
        return path

    out["missing"] = (env.path("nowhere"), ["nowhere"])
    out["empty"] = (folder("empty"), ["empty"])
    good = os.path.join(MODELS, "layers", "layers.safetensors")
    with open(good, "rb") as f:
        blob = f.read()

    path = folder("cut")
    with open(os.path.join(path, "model.safetensors"), "wb") as f:
        f.write(blob[:-1000])
    out["cut"] = (path, ["model.safetensors"])

    path = folder("header")
    with open(os.path.join(path, "model.safetensors"), "wb") as f:
        f.write(b"\xff" * 8 + blob[8:])
    out["header"] = (path, ["model.safetensors"])

    tensors = ref.load(good)
    path = folder("shape")
    keep = {n: t for n, t in tensors.items() if n.startswith("k4.mul1.")}
    keep["k4.mul1.suh"].shape, keep["k4.mul1.suh"].data = [128], keep["k4.mul1.suh"].data[:256]
    ref.save(os.path.join(path, "model.safetensors"), keep)
    out["shape"] = (path, ["model.safetensors", "k4.mul1"])

    path = folder("nan")
    keep = {n: t for n, t in ref.load(good).items() if n.startswith("k4.mul1.")}
    keep["k4.mul1.svh"].data = b"\x00\x7e" + keep["k4.mul1.svh"].data[2:]
    ref.save(os.path.join(path, "model.safetensors"), keep)
    out["nan"] = (path, ["model.safetensors", "k4.mul1.svh"])
    return out


def test_refused_model_ends_the_daemon(env):
    for name, (path, words) in broken_checkpoints(env).items():
        d = env.daemon((f"bad={path}",), wait=False)
        equal(d.wait_exit(), 1, f"{name}: status")
        for word in words:
            check(word in d.log(), f"{name}: \"{word}\" is not in: {d.log()}")
        check(d.log().count("\n") < 20, f"{name}: a restart loop? {d.log()}")


def test_refused_load_leaves_the_rest_alone(env):
    d = env.daemon((LAYERS,))
    before = d.status()["weight_bytes"]
    for name, (path, words) in broken_checkpoints(env).items():
        rc, _, err = d.ctl("load", f"bad-{name}={path}")
        equal(rc, 3, f"{name} ({err.strip()})")
        for word in words:
            check(word in err, f"{name}: \"{word}\" is not in: {err}")
        equal(linear_status(env, d), (0, ""), f"after {name}")
    equal(d.status()["weight_bytes"], before, "weight bytes")


def test_load_and_unload_while_serving(env):
    d = env.daemon((LAYERS,))
    empty = d.settled()
    before = d.status()["weight_bytes"]
    for _ in range(1 if env.short else 3):
        d.ctl_ok("load", f"second={env.model('tiny-llama')}")
        names = {m["name"]: m for m in d.status()["models"]}
        equal(names["second"]["state"], "ready", "state after load")
        check(d.status()["weight_bytes"] > before, "a second model weighs nothing")
        rc, _, err = d.ctl("load", f"second={env.model('tiny-llama')}")
        equal(rc, 3, f"a second model of that name ({err.strip()})")
        x = x_file(env, "x384.npy", 384)
        d.ctl_ok("run", "linear", "second", "lm_head", x, "-o", env.path("y.npy"))
        d.ctl_ok("unload", "second")
        rc, err = linear_status(env, d, "lm_head", "second")
        equal(rc, 3, "a request to an unloaded model")
        wait_for(lambda: d.status()["weight_bytes"] == before, "memory of the unloaded model")
        equal(linear_status(env, d), (0, ""), "the other model")
    d.wait_held(empty, "after load and unload")
    rc, _, err = d.ctl("unload", "nonesuch")
    equal(rc, 3, "unload of what is not there")
    check("nonesuch" in err, f"the message does not name the model: {err}")


def test_load_again_after_a_refusal(env):
    """A load takes the place of one that failed; also a worker that is started later has the new model."""
    d = env.daemon((LAYERS,))
    path = env.path("unfinished")
    os.mkdir(path)
    for _ in range(2):
        rc, _, err = d.ctl("load", f"late={path}")
        check(rc == 3 and "unfinished" in err, f"an empty folder: status {rc}, {err}")
        equal(sorted((m["name"], m["state"]) for m in d.status()["models"] if m["state"] != "unloading"),
              [("late", "failed"), ("layers", "ready")], "models after a refusal")
    d.ctl_ok("load", f"late={env.model('layers')}")
    equal(linear_status(env, d, model="late"), (0, ""), "the model when it is there")
    rc, _, err = d.ctl("load", f"late={env.model('layers')}")
    check(rc == 3 and "unload it first" in err, f"a name that is taken: status {rc}, {err}")
    before = d.worker_pid()
    os.kill(before, signal.SIGKILL)
    wait_for(lambda: new_worker(d, [before]), "another worker")
    d.wait_ready()
    equal(sorted(m["name"] for m in d.status()["models"]), ["late", "layers"], "models after the restart")


def test_unload_under_requests(env):
    """Accepted requests finish, later ones get -ENOENT, nothing else."""
    d = env.daemon((f"llama={env.model('tiny-llama')}", LAYERS))
    client = env.spawn(env.program("examples/tiny_llama"), "--socket", d.sock, "--model", "llama", "generate", "--prompt",
                       "The", "--tokens", "480", "--temperature", "1", stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE)
    client.stdout.read(20)  # it runs
    d.ctl_ok("unload", "llama")
    _, err = client.communicate(timeout=WAIT)
    check(client.returncode in (0, 1), f"client: status {client.returncode}")
    if client.returncode:
        check(b"model was unloaded" in err, f"client: {err.decode()}")
    wait_for(lambda: all(m["name"] != "llama" for m in d.status()["models"]), "the model to go")
    equal(linear_status(env, d), (0, ""), "the other model")


def slow_model(env, gib):
    """A checkpoint that takes a while to read: a matrix, and a row table of zeros that is left out but read."""
    folder = env.path(f"slow{gib}")
    file = os.path.join(folder, "model.safetensors")
    if not os.path.exists(file):
        os.mkdir(folder)
        tensors = {n: t for n, t in ref.load(os.path.join(MODELS, "layers", "layers.safetensors")).items()
                   if n.startswith("k4.mul1.")}
        ref.save(file, tensors, {"table.trellis": ("I16", [gib << 19, 1024])})
    return folder


def test_status_while_loading(env):
    """The socket answers at once and says how far the load is; a request to that model is told so, others run."""
    d = env.daemon((LAYERS, f"slow={slow_model(env, 2)}"), wait=False)
    progress, told = [], []

    def done():
        check(d.proc.poll() is None, f"the daemon ended: {d.log()}")
        rc, out, _ = d.ctl("status", "--json")
        if rc:
            return False
        status = json.loads(out)
        slow = next(m for m in status["models"] if m["name"] == "slow")
        if slow["state"] == "loading":
            equal(status["state"], "starting", "state of the daemon")
            progress.append(slow["bytes_loaded"])
            check(slow["bytes_loaded"] <= slow["bytes_total"], f"progress: {slow}")
            rc, err = linear_status(env, d, model="slow")
            if rc == 3:
                check("loading" in err, f"a request while loading: {err}")
                told.append(err)
        return slow["state"] == "ready"
    wait_for(done, "the model", 3 * WAIT)
    check(len(progress) > 1 and progress[0] < progress[-1], f"no progress was shown: {progress}")
    check(told, "no request was told that the model is loading")
    equal(linear_status(env, d, model="slow"), (0, ""), "the model when it is there")
    equal(linear_status(env, d), (0, ""), "the other model")


def test_unload_while_loading(env):
    """The load is given up; the name is free again."""
    d = env.daemon((LAYERS,))
    before = d.settled()
    d.ctl_ok("load", f"slow={slow_model(env, 64)}", "--no-wait")
    equal(next(m for m in d.status()["models"] if m["name"] == "slow")["state"], "loading", "state")
    equal(linear_status(env, d), (0, ""), "another model meanwhile")
    d.ctl_ok("unload", "slow")
    wait_for(lambda: len(d.status()["models"]) == 1, "the model to go")
    d.ctl_ok("load", f"slow={env.model('layers')}")
    d.ctl_ok("unload", "slow")
    d.wait_held(before, "after a load that was given up")


def test_worker_killed(env):
    """Clients get -ESTALE at once, the supervisor starts a new worker, a new connection works."""
    d = env.daemon((f"llama={env.model('tiny-llama')}", LAYERS))
    for round_ in range(1 if env.short else 2):
        before = d.status()
        client = env.spawn(env.program("examples/tiny_llama"), "--socket", d.sock, "--model", "llama", "generate",
                           "--prompt", "The", "--tokens", "480", "--temperature", "1", stdout=subprocess.PIPE,
                           stderr=subprocess.PIPE)
        client.stdout.read(20)
        os.kill(before["worker_pid"], signal.SIGKILL)
        _, err = client.communicate(timeout=WAIT)
        equal(client.returncode, 1, "status of a client whose worker died")
        check(b"gone" in err or b"went away" in err, f"client: {err.decode()}")
        d.wait_ready()
        after = d.status()
        check(after["worker_pid"] != before["worker_pid"], "no new worker")
        equal(after["supervisor_pid"], before["supervisor_pid"], "supervisor")
        equal(linear_status(env, d), (0, ""), f"after restart {round_ + 1}")


def test_worker_killed_with_requests_in_flight(env):
    """Each outstanding request ends with one -ESTALE, in order; models loaded at run time are there again."""
    d = env.daemon((f"tiny-llama={env.model('tiny-llama')}",))
    d.ctl_ok("load", LAYERS)
    client = env.spawn(env.program("tests/integration/async"), d.sock, "tiny-llama", "model.layers.0.mlp.down_proj", "stale",
                       stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    equal(client.stdout.readline().strip(), "ready", "async stale")
    os.kill(d.worker_pid(), signal.SIGKILL)
    _, err = client.communicate(timeout=2 * WAIT)
    equal(client.returncode, 0, f"async stale ({err.strip()})")
    d.wait_ready()
    equal(sorted(m["name"] for m in d.status()["models"]), ["layers", "tiny-llama"], "models after the restart")
    equal(linear_status(env, d), (0, ""), "a model that was loaded at run time")


def test_restart_limit(env):
    """A worker that dies again and again ends the daemon with status 3 instead of a loop."""
    d = env.daemon(args=["--restart-limit", "2", "--restart-window", "600"])
    pids = []
    for _ in range(3):
        pids.append(wait_for(lambda: new_worker(d, pids), "a worker"))
        os.kill(pids[-1], signal.SIGKILL)
    equal(d.wait_exit(), 3, "status")
    check(not d.listening(), "the socket still answers")


def new_worker(d, known):
    rc, out, _ = d.ctl("status", "--json")
    pid = json.loads(out)["worker_pid"] if rc == 0 else 0
    return pid if pid not in known else 0


def test_supervisor_killed(env):
    """Without a supervisor the worker does not go on alone."""
    d = env.daemon()
    worker = d.worker_pid()
    os.kill(d.proc.pid, signal.SIGKILL)
    d.proc.wait()
    wait_for(lambda: not os.path.exists(f"/proc/{worker}") or zombie(worker), "the worker to end")


def test_supervisor_killed_and_started_again(env):
    """Whoever starts the next daemon at once finds the socket free, also from a worker that is busy."""
    sock = env.path("again.sock")
    models = (f"tiny-llama={env.model('tiny-llama')}",)
    for _ in range(2 if env.short else 6):
        d = env.daemon(models, sock=sock)
        client = env.spawn(env.program("examples/tiny_llama"), "--socket", sock, "generate", "--prompt", "The",
                           "--tokens", "480", "--temperature", "1", stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        client.stdout.read(20)
        os.kill(d.proc.pid, signal.SIGKILL)
        d.proc.wait()
    d = env.daemon(models, sock=sock)
    # The writers end with the end of their worker; the library may have found the next one before they did.
    wait_for(lambda: d.status()["clients"] == 1, "the clients of the daemons before to leave")


def zombie(pid):
    try:
        with open(f"/proc/{pid}/stat") as f:
            return f.read().rsplit(")", 1)[1].split()[0] == "Z"
    except FileNotFoundError:
        return True


def test_drain_on_sigterm(env):
    """What was accepted finishes; the daemon ends with status 0; a client in between is told why."""
    d = env.daemon((f"llama={env.model('tiny-llama')}",))
    client = env.spawn(env.program("examples/tiny_llama"), "--socket", d.sock, "--model", "llama", "generate", "--prompt",
                       "The", "--tokens", "480", "--temperature", "1", stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE)
    client.stdout.read(20)
    equal(d.stop(), 0, "status after SIGTERM")
    _, err = client.communicate(timeout=WAIT)
    check(client.returncode in (0, 1), f"client: status {client.returncode}")
    if client.returncode:
        check(re.search(rb"shut|drain|gone|went away", err), f"client: {err.decode()}")
    check(not os.path.exists(f"/proc/{d.proc.pid}"), "the supervisor is still there")


def test_drain_verb(env):
    d = env.daemon((LAYERS,))
    d.ctl_ok("drain")
    equal(d.wait_exit(), 0, "status after drain")


def test_stop_while_loading_and_twice(env):
    """A load takes minutes: SIGTERM does not wait for it."""
    d = env.daemon((f"slow={slow_model(env, 64)}",), wait=False)
    wait_for(lambda: "loading" in d.log(), "the load to begin")
    d.proc.send_signal(signal.SIGTERM)
    d.proc.send_signal(signal.SIGTERM)
    # Two signals may be taken as one; a second one cuts the drain short, which is a status of its own.
    rc = d.wait_exit()
    check(rc in (0, -signal.SIGTERM) or (rc == 1 and "to be ended again" in d.log()), f"status {rc} after two SIGTERMs at once")


def test_check_config(env):
    program = env.program("exl3-daemon")
    good = env.path("good.conf")
    with open(good, "w") as f:
        f.write("; a comment\nbackend = cpu\nthreads = 2\narena-max = 64M\n")
    rc, out, err = env.run(program, "--config", good, "--check-config")
    equal(rc, 0, f"a good file ({err or out})")
    for text, word in (("threads = many\n", "threads"), ("tread = 1\n", "tread"), ("backend = abacus\n", "backend"),
                       ("spin-us = -1\n", "spin-us"), ("what is this\n", "bad.conf:1"),
                       ("backend = cpu\n[model a]\n", "bad.conf:2")):
        bad = env.path("bad.conf")
        with open(bad, "w") as f:
            f.write(text)
        rc, out, err = env.run(program, "--config", bad, "--check-config")
        check(rc != 0 and word in out + err and "bad.conf" in out + err, f"{text.strip()!r}: status {rc}, {out}{err}")
    rc, _, err = env.run(program, "--threads", "-5", "--check-config")
    check(rc != 0 and "threads" in err, f"a bad flag: status {rc}, {err}")
    rc, out, _ = env.run(program, "--help")
    check(rc == 0 and "--restart-limit" in out, "--help does not list the keys")
    start = time.monotonic()
    rc, _, err = env.run(program, "--no-such-flag")
    check(rc not in (0, None) and "no-such-flag" in err and time.monotonic() - start < WAIT, f"unknown flag: {rc} {err}")


def test_check_config_looks_at_the_models(env):
    """What a start would refuse is found without one: each thing with file and line, or the flag, and what is wrong."""
    program, conf = env.program("exl3-daemon"), env.path("models.conf")
    made = {name: env.path(name) for name in ("empty", "no-trellis", "cut", "odd-config", "no-shard", "good")}
    for path in made.values():
        os.mkdir(path)
    for name in ("cut", "odd-config", "good"):
        for file in os.listdir(env.model("layers")):
            shutil.copy(os.path.join(env.model("layers"), file), made[name])
    with open(os.path.join(made["cut"], "layers.safetensors"), "r+b") as f:
        f.truncate(1000)
    with open(os.path.join(made["odd-config"], "config.json"), "w") as f:
        f.write("{ not json")
    shutil.copy(os.path.join(env.model("layers"), "original.safetensors"), made["no-trellis"])
    for file in os.listdir(env.model("tiny-deepseek")):
        if "00002-of" not in file:
            shutil.copy(os.path.join(env.model("tiny-deepseek"), file), made["no-shard"])
    with open(conf, "w") as f:
        f.write("".join(f"[model {name}]\n# a comment\ndevice = cpu\npath = {path}\n" for name, path in made.items()))
        f.write("[daemon]\nmodel = gone=/nonexistent/folder\n")
    rc, out, err = env.run(program, "--config", conf, "--socket", env.path("no/such/x.sock"), "--model", "flag=/nonexistent",
                           "--check-config")
    equal(rc, 2, f"status ({err})")
    lines = err.splitlines()
    equal(len(lines), 8, f"things that are wrong ({err})")
    for place, name, words in ((f"{conf}:4", "empty", "no *.safetensors"), (f"{conf}:8", "no-trellis", "trellis"),
                               (f"{conf}:12", "cut", "layers.safetensors"), (f"{conf}:16", "odd-config", "config.json"),
                               (f"{conf}:20", "no-shard", "00002-of-00002"), (f"{conf}:26", "gone", "No such file"),
                               ("--model", "flag", "No such file")):
        check(any(f" {place}: model {name}: " in line and words in line for line in lines),
              f"{name}: nothing names {place} and {words}: {err}")
    check(any("socket" in line and "make the folder" in line for line in lines), f"the socket's folder: {err}")
    check("# model good: 2 files, 24 matrices" in out, f"what is right is described: {out}")
    rc, out, err = env.run(program, "--model", f"good={made['good']}", "--socket", env.path("x.sock"), "--check-config")
    equal((rc, err), (0, ""), "a good model")
    printed = env.path("printed.conf")
    with open(printed, "w") as f:
        f.write(out)
    equal(env.run(program, "--config", printed, "--check-config")[1], out, "what is printed reads back")
    for args, hint in ((("--thread", "3"), "(did you mean --threads?)"), (("--tenant", "a:wieght=3"), "(did you mean weight?)"),
                       (("--xyzzy",), "unknown flag '--xyzzy'; see")):
        rc, _, err = env.run(program, *args)
        check(rc == 2 and hint in err, f"{args}: status {rc}, {err}")
