# SPDX-License-Identifier: Apache-2.0
"""Weights outlive the worker: the next one adopts them, or says why it reads the files again."""
import os
import re
import shutil
import signal
import time

import exl3ref as ref
from harness import Skipped, check, equal, wait_for

def checkpoint(env, name, model="layers"):
    """A copy of a model that a scenario may change."""
    path = env.path(name)
    shutil.rmtree(path, ignore_errors=True)
    shutil.copytree(env.model(model), path)
    return path


def result(env, d, model="m", module="k4.mul1"):
    """The bits of one product, by a new client."""
    x, y = env.path("x.npy"), env.path(f"y-{os.urandom(4).hex()}.npy")
    if not os.path.exists(x):
        ref.npy_save(x, "<f4", (1, 256), [0.01 * i for i in range(256)])
    d.ctl_ok("run", "linear", model, module, x, "-o", y)
    with open(y, "rb") as f:
        return f.read()


def next_worker(d, pid, sig=signal.SIGKILL):
    """Ends a worker and waits for the next one, with its models."""
    os.kill(pid, sig)

    def there():
        rc, _, _ = d.ctl("status", "--json")
        if rc:
            return False
        s = d.status()
        states = [m["state"] for m in s["models"]]
        return s["worker_pid"] != pid and all(m == "ready" for m in states) and s
    return wait_for(there, "the next worker with its models")


def read_bytes(pid):
    """Bytes that a process has asked files for; its own program and libraries among them."""
    with open(f"/proc/{pid}/io") as f:
        return int(re.search(r"rchar: (\d+)", f.read()).group(1))


def test_next_worker_adopts(env):
    """No file is read again, not one bit of the result differs, and it can be done over and over."""
    path = checkpoint(env, "adopt", "tiny-llama")
    size = os.path.getsize(os.path.join(path, "model.safetensors"))
    d = env.daemon((f"m={path}", "layers"))
    before, first = d.status()["models"], result(env, d, "layers")
    fingerprints, modules = [m["fingerprint"] for m in before], d.ctl_ok("modules", "m")
    for turn in range(3):
        pid = d.worker_pid()
        s = next_worker(d, pid)
        equal([m["fingerprint"] for m in s["models"]], fingerprints, "fingerprints")
        equal(d.ctl_ok("modules", "m"), modules, "modules")
        equal(result(env, d, "layers"), first, "the same product, another worker")
        equal(d.log().count("model m: ready, adopted"), turn + 1, "adoptions in the log")
        if env.backend == "cpu":
            check(read_bytes(s["worker_pid"]) < size, f"the worker has read {read_bytes(s['worker_pid'])} bytes, the model has {size}")
    equal(d.log().count("loaded anew"), 0, "loads of files that were adopted")
    kinds = [e["kind"] for e in d.json("events")["events"] if e["kind"] in ("loaded", "adopted")]
    equal(kinds, ["loaded"] * 2 + ["adopted"] * 6, "events")


def test_all_hashes(env):
    """Every byte is looked at before it is served again."""
    d = env.daemon(("layers", "tiny-llama"), args=["--adopt", "verify"])
    first = result(env, d, "layers")
    next_worker(d, d.worker_pid())
    equal(result(env, d, "layers"), first, "result")
    equal(d.log().count("ready, adopted"), 2, "adoptions")


def test_loaded_and_unloaded_at_run_time(env):
    d = env.daemon(("layers",))
    d.ctl_ok("load", f"m={checkpoint(env, 'late')}")
    first = result(env, d)
    next_worker(d, d.worker_pid())
    equal(result(env, d), first, "a model that a client had loaded")
    check("model m: ready, adopted" in d.log(), "it was not adopted")
    d.ctl_ok("unload", "m")
    s = next_worker(d, d.worker_pid())
    equal([m["name"] for m in s["models"]], ["layers"], "models after an unload and a crash")


def test_unload_gives_the_memory_back(env):
    """Nobody holds a slab that was unloaded: not the supervisor, not the worker."""
    d = env.daemon()

    def held():
        return sum(n for kind, n in d.fds(d.proc.pid).items() if kind.startswith(("/memfd:", "/dev/nvidia")))
    before = held()
    for _ in range(3):
        d.ctl_ok("load", f"m={env.model('layers')}")
        wait_for(lambda: held() == before + 3, "kept weights")
        d.ctl_ok("unload", "m")
        wait_for(lambda: held() == before, "the end of kept weights")


def other_weights(path):
    """Exchanges the checkpoint for one with other values."""
    file = os.path.join(path, "layers.safetensors")
    tensors = ref.load(file)
    data = bytearray(tensors["k4.mul1.trellis"].data)
    data[77] ^= os.urandom(1)[0] | 4
    tensors["k4.mul1.trellis"].data = bytes(data)
    ref.save(file + ".new", tensors)
    os.replace(file + ".new", file)


def test_changed_checkpoint(env):
    """Other files: they are loaded. Broken files: what was serving goes on."""
    path = checkpoint(env, "changed")
    file = os.path.join(path, "layers.safetensors")
    d = env.daemon((f"m={path}",))
    first, print1 = result(env, d), d.status()["models"][0]["fingerprint"]

    os.utime(file)
    next_worker(d, d.worker_pid())
    check("loaded anew, not adopted" in d.log() and "was written since" in d.log(), d.log()[-1500:])
    equal(result(env, d), first, "the same content, written again")

    other_weights(path)
    s = next_worker(d, d.worker_pid())
    second, print2 = result(env, d), s["models"][0]["fingerprint"]
    check(second != first and print1 != print2, "the new content does not count")

    with open(file, "rb") as f:
        blob = f.read()
    with open(file, "wb") as f:
        f.write(blob[:-100])
    for _ in range(2):
        s = next_worker(d, d.worker_pid())
        equal((result(env, d), s["models"][0]["fingerprint"]), (second, print2), "with a broken checkpoint")
    check("the weights that were serving go on" in d.log(), d.log()[-1500:])
    events = d.ctl_ok("events")
    check("not adopted: " in events and "the files have changed and are refused" in events, events)
    shutil.rmtree(path)
    next_worker(d, d.worker_pid())
    equal(result(env, d), second, "without a checkpoint")


def test_never_adopt(env):
    d = env.daemon(("layers",), args=["--adopt", "never"])
    first = result(env, d, "layers")
    check(not any("exl3-slab" in k for k in d.fds(d.proc.pid)), "weights are kept")
    next_worker(d, d.worker_pid())
    equal(result(env, d, "layers"), first, "read again")
    check("adopted" not in d.log(), d.log()[-1000:])


def test_domains_share_one_copy(env):
    """One loads, the other adopts; one dies, the other goes on; memory is there once."""
    conf = env.path("domains.conf")
    with open(conf, "w") as f:
        f.write("[domain other]\nusers = 12345\n")
    d = env.daemon((f"m={checkpoint(env, 'shared', 'tiny-llama')}",), args=["--config", conf])
    wait_for(lambda: d.log().count("serves on") == 2, "two workers")
    log = d.log()
    equal((log.count("model m: ready, adopted"), log.count("model m: ready,")), (1, 2), "adopted, ready")
    slabs = {slab_inode(pid) for pid in workers(d)} if env.backend == "cpu" else set()
    check(len(slabs) < 2, f"slabs of {workers(d)}: {slabs}")
    first = result_llama(env, d)
    time.sleep(0.1)
    for pid in workers(d):
        os.kill(pid, signal.SIGKILL)
    wait_for(lambda: d.log().count("serves on") == 4, "two new workers")
    equal(result_llama(env, d), first, "after both have died")
    if slabs:
        equal({slab_inode(pid) for pid in workers(d)}, slabs, "the same slab")


def result_llama(env, d):
    x = env.path("x384.npy")
    if not os.path.exists(x):
        ref.npy_save(x, "<f4", (1, 384), [0.01 * i for i in range(384)])
    y = env.path("y384.npy")
    d.ctl_ok("run", "linear", "m", "lm_head", x, "-o", y)
    with open(y, "rb") as f:
        return f.read()


def workers(d):
    with open(f"/proc/{d.proc.pid}/task/{d.proc.pid}/children") as f:
        return [int(p) for p in f.read().split()]


def slab_inode(pid):
    with open(f"/proc/{pid}/maps") as f:
        found = {line.split()[4] for line in f if "memfd:exl3-slab" in line}
    equal(len(found), 1, f"slabs mapped by {pid}")
    return found.pop()


def test_failures_on_the_way(env):
    """Whatever fails on the way from one worker to the next: the model is there, and right."""
    said = {"adopt.read": "kept weights are not used: reading", "adopt.slab": "kept weights are not used: mapping",
            "keep.put": "weights cannot be kept: out of memory", "share.give": "cannot be handed on",
            "weights.manifest": "another worker will have to load it again"}
    for point, words in said.items():
        for n in (1, 2):
            d = env.daemon(("layers",), environ={"EXL3_FAULT": f"{point}:{n}"})
            first = result(env, d, "layers")
            for _ in range(2):
                next_worker(d, d.worker_pid())
                equal(result(env, d, "layers"), first, f"result with {point}:{n}")
            met = words in d.log()
            check(met or n > 1, f"{point}: nothing has failed: {d.log()}")
            equal(d.stop(), 0, "status")


def test_driver_is_held(env):
    """The supervisor keeps the GPUs' device files open, so that they stay up without a worker."""
    if env.backend != "cuda":
        raise Skipped("needs a GPU")
    d = env.daemon()
    held = [kind for kind in d.fds(d.proc.pid) if kind.startswith("/dev/nvidia")]
    check("/dev/nvidiactl" in held and any(kind[len("/dev/nvidia"):].isdigit() for kind in held), f"held: {held}")
