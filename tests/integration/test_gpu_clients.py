# SPDX-License-Identifier: Apache-2.0
"""Clients with CUDA: their memory, calls in their streams, their end; each also where both share an MPS server."""
import os
import shutil
import signal
import subprocess
import sys
import time

from harness import HERE, WAIT, Skipped, check, equal, wait_for
from test_python import python

MODEL, MODULE = "layers", "k4.mul1"


def need_gpu(env):
    if env.backend != "cuda":
        raise Skipped("needs a GPU: --backend cuda")


def client(env, d, command, environ=None):
    rc, out, err = env.run(env.program("tests/integration/gpu_client"), d.sock, MODEL, MODULE, command,
                           env=dict(os.environ, **(environ or {})))
    if rc == 77:
        raise Skipped(out.strip())
    check(rc == 0, f"gpu_client {command}: status {rc}, {err.strip()}")


def spawn(env, d, command, environ=None):
    proc = env.spawn(env.program("tests/integration/gpu_client"), d.sock, MODEL, MODULE, command,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=dict(os.environ, **(environ or {})))
    line = proc.stdout.readline().strip()
    if line != "ready":
        check(False, f"gpu_client {command}: {line} {proc.stderr.read()}")
    return proc


def gpu_held(d):
    """Bytes and pieces of clients' memory that the daemon has mapped, and its connections."""
    s = d.status()
    dev = s["devices"][0]
    return {k: dev.get(k, 0) for k in ("device_arena_bytes", "import_bytes", "imports", "arena_bytes")} | \
        {k: s.get(k, 0) for k in ("clients", "channels")}


def all_back(d, what):
    """A client may need a moment to be noticed, and the thread that frees a moment more."""
    nothing = {"device_arena_bytes": 0, "import_bytes": 0, "imports": 0, "arena_bytes": 0, "clients": 1, "channels": 0}
    until = time.monotonic() + WAIT
    while gpu_held(d) != nothing:
        check(time.monotonic() < until, f"{what}: still held: {gpu_held(d)}")
        time.sleep(0.05)


def fds_back(d, before, what):
    wait_for(lambda: d.fds() == before, f"{what}: the worker's descriptors as before ({before}, now {d.fds()})")


def run_all(env, d, commands, environ=None):
    client(env, d, "stream", environ)  # what the driver opens once
    all_back(d, "the first client")
    before = d.fds()
    for command in commands:
        client(env, d, command, environ)
        all_back(d, command)
        fds_back(d, before, command)


MPS = {"EXL3_TEST_MPS": "1"}


def without_mps(env):
    return env.daemon((MODEL,), ("--mps", "off"))


def with_mps(env, *args):
    if not shutil.which("nvidia-cuda-mps-control"):
        raise Skipped("no nvidia-cuda-mps-control")
    return env.daemon((MODEL,), ("--mps", "require") + args)


def test_memory_of_clients(env):
    need_gpu(env)
    run_all(env, without_mps(env), ("arena", "ipc", "vmm", "twice", "foreign", "freed"))


def test_calls_in_streams(env):
    need_gpu(env)
    run_all(env, without_mps(env), ("stream", "never", "many"))


def test_pytorch(env):
    need_gpu(env)
    d = without_mps(env)
    client(env, d, "ipc")
    all_back(d, "the first client")
    before = d.fds()
    rc, out, err = env.run(sys.executable, "-B", os.path.join(HERE, "python_gpu.py"), d.sock,
                           env={**os.environ, "PYTHONPATH": os.path.join(HERE, "..", "..", "client", "python"),
                                "EXL3_LIBRARY": env.program("libexl3.so")})
    if rc == 77:
        raise Skipped(out.strip())
    equal((rc, out.strip()), (0, "ok"), f"python_gpu.py ({err.strip()[-500:]})")
    all_back(d, "PyTorch")
    fds_back(d, before, "PyTorch")


def test_pytorch_modules(env):
    """exl3_torch.py on tensors of the GPU, after the same on those of the CPU."""
    need_gpu(env)
    d = env.daemon((f"layers={env.model('layers')}", f"tiny-llama={env.model('tiny-llama')}"))
    rc, out, err = python(env, "python_torch.py", d.sock, env.model("tiny-llama"), "cuda")
    if rc == 77:
        raise Skipped(out.strip())
    equal((rc, out.strip().split("\n")[-1]), (0, "ok"), f"python_torch.py ({err.strip()[-800:]})")
    all_back(d, "modules of PyTorch")


def test_own_weights_are_no_buffer(env):
    need_gpu(env)
    d = without_mps(env)
    client(env, d, "slab")
    all_back(d, "slab")
    client(env, d, "ipc")


def killed(env, d, when, environ=None):
    """True: the worker is the same as before."""
    pid = d.worker_pid()
    proc = spawn(env, d, when, environ)
    others = gpu_held(d)
    check(others["imports"] == 2 and others["device_arena_bytes"] > 0, f"before the end: {others}")
    proc.kill()
    proc.wait()
    time.sleep(0.3)

    def there():
        rc, out, _ = d.ctl("status", "--json")
        return rc == 0 and '"ready"' in out
    wait_for(there, f"a worker after a client was killed ({when})")
    all_back(d, f"killed {when} a kernel")
    return d.worker_pid() == pid


def test_killed(env):
    """Outside of MPS nobody else notices, whatever ran."""
    need_gpu(env)
    d = without_mps(env)
    for when in ("before", "in", "after"):
        for _ in range(env.loops):
            check(killed(env, d, when), f"killed {when} a kernel: the worker has changed")
        client(env, d, "ipc")


def test_stream_goes_on_without_its_worker(env):
    need_gpu(env)
    d = without_mps(env)
    proc = spawn(env, d, "stale")
    os.kill(d.worker_pid(), signal.SIGKILL)
    _, err = proc.communicate(timeout=2 * WAIT)
    equal(proc.returncode, 0, f"gpu_client stale ({err.strip()})")


def test_mps_memory_and_streams(env):
    need_gpu(env)
    run_all(env, with_mps(env), ("arena", "ipc", "vmm", "twice", "freed", "never", "many"), MPS)


def test_mps_killed(env):
    """After its work nobody notices. In a kernel its MPS server ends, all contexts with it: a new worker serves."""
    need_gpu(env)
    d = with_mps(env, "--restart-limit", "20")
    check(killed(env, d, "after", MPS), "killed after its kernels: the worker has changed")
    client(env, d, "ipc", MPS)
    for when in ("before", "in"):
        killed(env, d, when, MPS)
        client(env, d, "ipc", MPS)
        all_back(d, f"after one was killed {when} a kernel")
