#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""chaos.py - for minutes: clients with verified results while workers, clients and supervisors are killed.

usage: chaos.py [--build DIR] [--backend NAME] [--seconds N] [--seed N] [--csv FILE]

Survivors (tests/integration/survivor.c: linear, dense MLP, routed experts, attention) check every result and go on
after every restart. Meanwhile, at random: the worker or the supervisor is killed, clients die at each of their steps,
others scribble on their rings, take all descriptors and arenas they may, leave rings full, and a checkpoint that nobody
uses is replaced by another one while it is loaded, served and unloaded. The tenant's limits change, another daemon takes
over, or begins to, and a second domain's worker is killed. On a GPU, as root, with an MPS control program:
clients of the daemon's MPS server make illegal accesses and die inside of kernels. At the end: not one wrong result, no request
without a completion, and the daemon holds what it held at the start.
Status 0: all of that; 1: not; the seed is printed first.
"""
import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import time

sys.dont_write_bytecode = True
import harness  # noqa: E402
from harness import WAIT, Failed, Survivor, check, equal, kill_under, wait_for  # noqa: E402

DEEPSEEK, LLAMA, SWAP = "tiny-deepseek", "tiny-llama", "swap"
LINEAR = "model.layers.0.mlp.down_proj"
SURVIVORS = ((LLAMA, LINEAR, "3"), (DEEPSEEK, "model.layers.1.mlp.experts", "2"), (DEEPSEEK, "model.layers.0.mlp", "1"),
             (DEEPSEEK, "mla", "2"), (LLAMA, LINEAR, "1", "manual"))
LIMITS = ["--arena-max", "64M", "--clients-max", "64", "--restart-limit", "1000", "--restart-window", "1"]


class Chaos:
    def __init__(self, env, rng, log=print):
        self.env, self.rng, self.log = env, rng, log
        self.sock = env.path("chaos.sock")
        self.swap = env.path("swap")
        self.models = [f"{m}={env.model(m)}" for m in (LLAMA, DEEPSEEK)]
        self.killed, self.done, self.turn = set(), {}, 0
        self.mps = env.backend == "cuda" and os.getuid() == 0 and shutil.which("nvidia-cuda-mps-control") is not None
        self.daemon = self.start()

    def start(self, *args, **kw):
        """With a second domain, whose users are others, and a tenant whose limits change all the time."""
        return self.env.daemon(self.models, ["--config", self.configure(), *LIMITS, *args]
                               + (["--mps", "require"] if self.mps else []), sock=self.sock, **kw)

    def configure(self):
        path = self.env.path("chaos.conf")
        with open(path + ".new", "w") as f:
            f.write("[domain other]\nusers = 4242\n"
                    f"[tenant us]\nusers = {os.getuid()}\nadmin = yes\n"
                    f"requests-per-second = {self.rng.choice((0, 1000, 20000, 10000000))}\n"
                    f"burst = {self.rng.choice((0, 1, 1000))}\n"
                    f"rows = {self.rng.choice((0, 64, 1024))}\n")
        os.replace(path + ".new", path)
        return path

    def worker(self):
        """Its pid, once it serves and is none that was killed."""
        def serving():
            rc, out, _ = self.daemon.ctl("status", "--json")
            pid = json.loads(out)["worker_pid"] if rc == 0 else 0
            return pid if pid not in self.killed else 0
        return wait_for(serving, "a worker that serves")

    # ---- what happens to it ----

    def kill_worker(self):
        pid = self.worker()
        self.killed.add(pid)
        os.kill(pid, signal.SIGKILL)

    def kill_supervisor(self):
        """The service manager starts it again at once."""
        os.kill(self.daemon.proc.pid, signal.SIGKILL)
        self.daemon.proc.wait()
        self.env.daemons.remove(self.daemon)
        self.daemon = self.start()

    def reload(self):
        """Other limits, while requests are delayed by the old ones."""
        self.configure()
        self.daemon.proc.send_signal(signal.SIGHUP)

    def take_over(self):
        """Another daemon takes over; at times it, or the old one, is killed in the middle."""
        old, new = self.daemon, self.start("--takeover", wait=False)
        ends, stays = old, new
        if self.rng.random() < 0.7:
            time.sleep(self.rng.random() * 0.4)
            ends, stays = self.rng.choice(((old, new), (new, old)))
            ends.proc.kill()
        ends.wait_exit()
        self.env.daemons.remove(ends)
        # The other one has ended as well if it had just left, or had not got everything yet.
        wait_for(lambda: stays.proc.poll() is not None or self.serves(stays), "one that serves, or the end of both")
        self.daemon = stays
        if stays.proc.poll() is not None:
            self.env.daemons.remove(stays)
            self.daemon = self.start()

    @staticmethod
    def serves(d):
        rc, out, _ = d.ctl("status", "--json")
        return rc == 0 and json.loads(out)["supervisor_pid"] == d.proc.pid

    def kill_other_domain(self):
        """Its worker has no clients: those of ours notice nothing."""
        rc, out, _ = self.daemon.ctl("domains", "--json")
        pids = [d["worker_pid"] for d in json.loads(out)["domains"] if d["name"] == "other"] if rc == 0 else []
        if pids and pids[0]:
            os.kill(pids[0], signal.SIGKILL)

    def dying_client(self):
        steps = self.env.run(self.env.program("tests/integration/dying"), "steps")[1].split()
        proc = self.env.spawn(self.env.program("tests/integration/dying"), self.sock, LLAMA, LINEAR,
                              self.rng.choice(steps), str(self.rng.randrange(3000)),
                              stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        proc.wait(WAIT)
        self.env.procs.remove(proc)

    def hostile_client(self):
        command = self.rng.choice((("entries",), ("garbage", str(self.rng.randrange(1 << 30)), "200"), ("words",), ("hello",)))
        args = command[:1] + ((LLAMA, LINEAR) if command[0] != "hello" else ()) + command[1:]
        # Its worker may be killed under it: what it says then counts for nothing.
        self.env.run(self.env.program("tests/integration/hostile"), self.sock, *args)

    def greedy_client(self):
        self.env.run(self.env.program("tests/integration/limits"), self.sock, "67108864", "64", LLAMA, LINEAR)

    def swap_checkpoint(self):
        """Another model under a path that is being served: what was loaded goes on, the next load is of the new one."""
        new = self.env.path(f"swap-{self.turn}")
        shutil.copytree(self.env.model(self.rng.choice((LLAMA, DEEPSEEK, "layers"))), new)
        old = self.swap + ".old"
        if os.path.exists(self.swap):
            os.rename(self.swap, old)
        os.rename(new, self.swap)
        shutil.rmtree(old, ignore_errors=True)
        # Any of these may meet a worker that has just been killed.
        self.daemon.ctl(*self.rng.choice((("load", f"{SWAP}={self.swap}"), ("unload", SWAP), ("load", f"{SWAP}={self.swap}"))))

    def gpu_fault(self):
        """An illegal access by a client of the same MPS server, or its death inside a kernel."""
        from test_gpu_domains import Client  # needs a GPU, as what it starts
        worker = self.worker()
        bad = Client(self.env, self.daemon)
        bad.say("work")
        bad.say(self.rng.choice(("fault", "spin")))
        bad.end()
        self.killed.add(worker)

    def event(self):
        kinds = (self.kill_worker, self.kill_worker, self.kill_supervisor, self.dying_client, self.dying_client,
                 self.hostile_client, self.hostile_client, self.greedy_client, self.swap_checkpoint, self.swap_checkpoint,
                 self.reload, self.reload, self.take_over, self.kill_other_domain)
        if self.mps:
            kinds += (self.gpu_fault, self.gpu_fault)
        if self.turn < 4:  # a short run has the main ones as well
            kinds = ((self.kill_worker,), (self.kill_supervisor,), (self.hostile_client,),
                     (self.gpu_fault if self.mps else self.dying_client,))[self.turn]
        kind = self.rng.choice(kinds)
        self.turn += 1
        kind()
        self.done[kind.__name__] = self.done.get(kind.__name__, 0) + 1
        time.sleep(self.rng.random() * 0.4)

    # ---- the run ----

    def survivors(self):
        return [Survivor(self.env, self.sock, *args) for args in SURVIVORS]

    def run(self, seconds):
        before = self.daemon.settled()
        survivors = self.survivors()
        until = time.monotonic() + seconds
        while time.monotonic() < until or self.turn < 4:
            self.event()
            for s in survivors:
                check(s.proc.poll() is None, f"survivor {s.args} has ended: {s.proc.stderr.read() if s.proc.poll() else ''}")
        # Whoever was between two requests whenever its worker was killed is not at the second of these.
        for _ in range(2):
            backs = [s.backs for s in survivors]
            kill_under(self.worker(), survivors)
            for s, n in zip(survivors, backs):
                wait_for(lambda s=s, n=n: s.backs > n, f"{s.args}, which is served again")
        self.daemon.wait_ready()
        results = [dict(s.end(), what=s.args[1]) for s in survivors]
        self.daemon.ctl("unload", SWAP)
        after = self.daemon.settled()
        equal(after["maps"], before["maps"], "mappings of shared memory at the end")
        for key in ("fds", "supervisor"):  # by number: each start has a log of its own
            equal(sum(after[key].values()), sum(before[key].values()), f"descriptors, {key}: {before[key]} {after[key]}")
        for r in results:
            check(r["stale"] > 0 and r["reconnects"] > 0, f"a survivor that has noticed nothing: {r}")
        return results


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--build", default="build")
    parser.add_argument("--backend", default="cpu")
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    harness.BACKEND = args.backend
    print(f"seed {args.seed}", flush=True)
    env = harness.Env(args.build, args.backend, False, 1)
    try:
        chaos = Chaos(env, random.Random(args.seed))
        results = chaos.run(args.seconds)
    except Failed as e:
        print(f"FAILED: {e}{env.logs()}")
        return 1
    finally:
        env.close()
    print(" ".join(f"{name} {n}" for name, n in sorted(chaos.done.items())))
    for r in results:
        print(f"{r['what']:40} {r['requests']:9} requests, {r['stale']} stale, {r['wrong']} wrong, {r['lost']} lost, "
              f"worst outage {r['worst_ms']:.0f} ms")
    print(f"median of the worst outages {statistics.median(r['worst_ms'] for r in results):.0f} ms")
    return 0


if __name__ == "__main__":
    sys.exit(main())
