# SPDX-License-Identifier: Apache-2.0
"""On a GPU: two domains of two users over one copy of the weights, each in an MPS server of its own; a fault in one.

With $EXL3_FIGURES the figures are appended to that file, one line each.
"""
import os
import shutil
import signal
import subprocess
import time

import exl3ref as ref
from harness import WAIT, Skipped, check, equal, wait_for
from test_domains import AS_BATCH, daemon, one_request, status, survivor

GIB = 4


def figure(text):
    if os.environ.get("EXL3_FIGURES"):
        with open(os.environ["EXL3_FIGURES"], "a") as f:
            f.write(text + "\n")


def needs(env):
    if env.backend != "cuda":
        raise Skipped("needs a GPU")
    if os.getuid() != 0:
        raise Skipped("needs root, to be several users")
    if not shutil.which("nvidia-cuda-mps-control"):
        raise Skipped("needs nvidia-cuda-mps-control")


def big_model(env):
    """GIB of weights, all zeros."""
    folder = env.path("big")
    if not os.path.exists(folder):
        os.mkdir(folder)
        holes = {}
        for i in range(GIB * 8):  # of 128 MiB, 4 bits
            holes[f"m{i}.trellis"] = ("I16", [1024, 1024, 64])
            holes[f"m{i}.suh"] = holes[f"m{i}.svh"] = ("F16", [16384])
        ref.save(os.path.join(folder, "model.safetensors"), {}, holes)
    return f"big={folder}"


class Client:
    """tests/gpu/facts/mps_client in the MPS server that exl3ctl names to its user."""

    def __init__(self, env, d, **who):
        line = d.ctl_ok("env", **who)
        check(line.startswith("export CUDA_MPS_PIPE_DIRECTORY='"), f"exl3ctl env: {line}")
        self.pipe = line.split("'")[1]
        self.proc = env.spawn(env.program("tests/gpu/facts/mps_client"), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                              text=True, env=dict(os.environ, CUDA_MPS_PIPE_DIRECTORY=self.pipe), **who)
        equal(self.proc.stdout.readline().strip(), "joined 1", "a client with CUDA of its own")

    def say(self, word):
        self.proc.stdin.write(word + "\n")
        self.proc.stdin.flush()
        return self.proc.stdout.readline().strip()

    def end(self):
        self.proc.kill()
        self.proc.wait()


def used_mib():
    out = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], capture_output=True, text=True,
                         timeout=30, check=True).stdout
    return sum(int(v) for v in out.split())


def back(env, d, generation, start):
    """Seconds from @start until that generation of batch has answered a request."""
    def there():
        rc, _, _ = one_request(env, d, **AS_BATCH)
        return rc == 0 and status(d, **AS_BATCH)["generation"] == generation
    wait_for(there, f"generation {generation} of batch")
    return time.monotonic() - start


def settle_mps(pipe):
    wait_for(lambda: not os.path.exists(pipe), f"the end of the old server in {pipe}")


def test_one_copy_of_the_weights(env):
    """GPU memory: a second domain costs a context and workspaces, not the weights once more."""
    needs(env)
    os.chmod(env.tmp, 0o711)
    base = used_mib()
    d = env.daemon((big_model(env),), ["--mps", "require"])
    equal(d.status()["state"], "serving", "state")
    one = used_mib() - base
    equal(d.stop(), 0, "status after SIGTERM")
    d = daemon(env, "--mps", "require", models=(big_model(env),))
    wait_for(lambda: [m["state"] for m in status(d, **AS_BATCH)["models"]] == ["ready"], "the model in batch")
    two = used_mib() - base
    figure(f"weights {GIB} GiB; GPU memory used with one domain {one} MiB, with two {two} MiB")
    check(two - one < GIB * 512, f"one domain: {one} MiB, two: {two} MiB; weights {GIB} GiB")
    check("adopted" in d.log(), "no worker has adopted weights")
    equal(d.stop(), 0, "status after SIGTERM")


def test_fault_in_one_domain(env):
    """A client's illegal access, then one killed inside a kernel: the domain's next generation serves, with the
    faulted server's survivors still there; the other domain sees nothing."""
    needs(env)
    d = daemon(env, "--mps", "require", "--restart-limit", "100", models=(big_model(env), "layers", "tiny-llama"))
    wait_for(lambda: {m["state"] for m in status(d, **AS_BATCH)["models"]} == {"ready"}, "the models in batch")
    before = status(d)
    check("OK" in d.ctl_ok("doctor", **AS_BATCH).upper(), "doctor")
    command = [env.program("examples/tiny_llama"), "--socket", d.sock, "--model", "tiny-llama", "generate", "--prompt",
               "The bridge over the river", "--tokens", "400"]
    rc, want, err = env.run(*command)
    equal(rc, 0, f"alone ({err})")
    ours = Client(env, d)
    bad, victim = Client(env, d, **AS_BATCH), Client(env, d, **AS_BATCH)
    check(ours.pipe != bad.pipe and bad.pipe == victim.pipe, f"servers: {ours.pipe}, {bad.pipe}, {victim.pipe}")
    equal([c.say("work") for c in (ours, bad, victim)], ["0"] * 3, "work before the fault")
    equal(one_request(env, d, **AS_BATCH)[0], 0, "a request of batch")

    here, there = survivor(env, d), survivor(env, d, **AS_BATCH)
    writer = env.spawn(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    start = time.monotonic()
    check(bad.say("fault") != "0", "the fault went by")
    seconds = back(env, d, 2, start)
    figure(f"fault of a client: next generation's first answer after {seconds * 1000:.0f} ms (survivors attached)")
    check(victim.say("work") != "0", "the fault did not reach the other client of that server: what is tested here?")
    equal(ours.say("work"), "0", "a client of the other domain")
    check(bad.proc.poll() is None and os.path.exists(bad.pipe), "the old server is not kept for its survivors")
    fresh = Client(env, d, **AS_BATCH)
    check(fresh.pipe != bad.pipe, "no fresh server")
    equal(fresh.say("work"), "0", "a new client of batch")

    # Killed inside a kernel: the same. (The survivors of the first fault are in the first server.)
    fresh.proc.stdin.write("spin\n")
    fresh.proc.stdin.flush()
    equal(fresh.proc.stdout.readline().strip(), "spinning", "a client in a kernel")
    time.sleep(0.3)
    start = time.monotonic()
    fresh.end()
    seconds = back(env, d, 3, start)
    figure(f"client killed inside a kernel: next generation's first answer after {seconds * 1000:.0f} ms")

    # SIGKILL of the worker.
    start = time.monotonic()
    os.kill(status(d, **AS_BATCH)["worker_pid"], signal.SIGKILL)
    seconds = back(env, d, 4, start)
    figure(f"worker killed: next generation's first answer after {seconds * 1000:.0f} ms")

    wait_for(lambda: there.backs > 0, "a client of batch that is served again")
    counts = there.end()
    figure(f"a client of batch without CUDA of its own: {counts}")
    check(counts["stale"] > 0 and counts["reconnects"] > 0, f"a client of batch that has noticed nothing: {counts}")
    counts = here.end()
    figure(f"the same in the other domain: {counts}")
    equal((counts["stale"], counts["reconnects"]), (0, 0), "what a client of the other domain has noticed")
    out, err = writer.communicate(timeout=WAIT)
    equal(writer.returncode, 0, f"a writer in the other domain ({err})")
    equal(out, want, "its text")
    after = status(d)
    equal((after["worker_pid"], after["generation"], after["errors"]), (before["worker_pid"], 1, 0), "the other domain's worker")
    equal(ours.say("work"), "0", "a client of the other domain, at the end")
    bad.end()
    victim.end()
    settle_mps(bad.pipe)

    # A fault while the worker has nothing to do is noticed without a request that meets it.
    last = Client(env, d, **AS_BATCH)
    time.sleep(1)
    start = time.monotonic()
    check(last.say("fault") != "0", "the fault went by")
    wait_for(lambda: any((e["domain"], e["kind"], e["generation"]) == ("batch", "ready", 5) for e in d.json("events")["events"]),
             "the next generation, without a request")
    figure(f"fault beside an idle worker: next generation ready after {(time.monotonic() - start) * 1000:.0f} ms")
    last.end()
    deaths = [e["text"] for e in d.json("events")["events"] if e["domain"] == "batch" and e["kind"] == "died"]
    equal(len(deaths), 4, f"deaths: {deaths}")
    figure("deaths: " + " | ".join(deaths))
    events = [e for e in d.json("events")["events"] if e["domain"] == "batch"]
    figure("events of batch: " + ", ".join(f"{e['kind']} {e['generation']} +{int(e['time_ms']) - int(p['time_ms'])} ms"
                                           for p, e in zip(events, events[1:])))
    ours.end()
    equal(d.stop(), 0, "status after SIGTERM")
    settle_mps(ours.pipe)
    check(not os.path.exists(os.path.dirname(ours.pipe)), "folders are left")
