#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""recovery.py - from SIGKILL of the worker to the first correct answer of a client that was connected.

    recovery.py --build BUILD [--backend cpu|cuda] [--mib N] [--kills N] [--dir FOLDER] [-o FILE]

Makes a model of N MiB (bench/load), serves it, and kills the worker several times; a client with an arena, a
channel and a module open waits for its next correct product. Then the same once with weights that are read from the
files again (--adopt never). A kill is more than restart-window after the one before, so each meets the first back-off
of 10 ms.
"""
import argparse
import ctypes
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MODULE = "model.layers.0.self_attn.q_proj"


def parse():
    p = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    p.add_argument("--build", default="build")
    p.add_argument("--backend", default="cpu")
    p.add_argument("--mib", type=int, default=1024)
    p.add_argument("--kills", type=int, default=5)
    p.add_argument("--dir", default=os.environ.get("TMPDIR", "/tmp"))
    p.add_argument("-o", dest="output")
    return p.parse_args()


class Daemon:
    def __init__(self, args, folder, model, *more):
        self.ctl = [os.path.join(args.build, "exl3ctl"), "--socket", os.path.join(folder, "d.sock")]
        self.log = open(os.path.join(folder, "log"), "wb+")
        start = time.monotonic()
        self.proc = subprocess.Popen([os.path.join(args.build, "exl3-daemon"), "--socket", self.ctl[2], "--backend", args.backend,
                                      "--model", f"m={model}", "--restart-window", "1", *more], stdout=self.log, stderr=self.log)
        while not self.ready():
            if self.proc.poll() is not None:
                sys.exit(f"the daemon ended: {self.words()}")
            time.sleep(0.02)
        self.load_seconds = time.monotonic() - start

    def status(self):
        r = subprocess.run(self.ctl + ["status", "--json"], capture_output=True, text=True)
        return json.loads(r.stdout) if r.returncode == 0 else None

    def ready(self):
        s = self.status()
        return s and s["models"] and all(m["state"] == "ready" for m in s["models"])

    def words(self):
        self.log.seek(0)
        return self.log.read().decode(errors="replace")

    def stop(self):
        self.proc.send_signal(signal.SIGTERM)
        self.proc.wait(60)


class Work:
    """One product whose result is known from before."""

    def __init__(self, exl3, path):
        self.exl3 = exl3
        self.client = exl3.Client(path, "recovery")
        self.module = self.client.model("m").module(MODULE)
        self.channel, arena = self.client.channel(), self.client.arena(1 << 20)
        self.x, self.y = arena.array("f2", (1, self.module.k)), arena.array("f4", (1, self.module.n))
        # One half in the bits of f16, with changing signs.
        self.x.bytes[:] = b"".join((0x3800 | (i * 7 % 3 == 0) << 15).to_bytes(2, "little") for i in range(self.module.k))
        self.channel.linear(self.module, self.x, self.y)
        self.want = bytes(self.y.bytes)

    def after_kill(self, pid):
        """(seconds until the connection was seen to be gone, until the first correct answer)"""
        start = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        while self.client.alive:
            time.sleep(0.0001)
        gone = time.monotonic() - start
        while True:
            self.y.bytes[:] = bytes(len(self.y.bytes))
            try:
                self.client.reconnect(60_000_000_000)
                self.channel.linear(self.module, self.x, self.y)
                break
            except self.exl3.Error as e:
                if time.monotonic() - start > 60:
                    sys.exit(f"no answer within 60 s: {e}")
                time.sleep(0.0005)
        seconds = time.monotonic() - start
        if bytes(self.y.bytes) != self.want:
            sys.exit("a wrong answer")
        return gone, seconds


def machine(args):
    if args.backend != "cpu":
        r = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True)
        return r.stdout.strip().splitlines()[0] if r.stdout else "GPU"
    with open("/proc/cpuinfo") as f:
        return next((line.split(":")[1].strip() for line in f if line.startswith("model name")), platform.machine())


def main():
    args = parse()
    args.build = os.path.abspath(args.build)
    os.environ.setdefault("EXL3_LIBRARY", os.path.join(args.build, "libexl3.so"))
    ctypes.CDLL(os.environ["EXL3_LIBRARY"])
    sys.path.insert(0, os.path.join(HERE, "..", "client", "python"))
    import exl3
    folder = tempfile.mkdtemp(prefix="exl3-recovery-", dir=args.dir)
    rows, daemons = [], []
    try:
        model = os.path.join(folder, "model")
        os.mkdir(model)
        subprocess.run([os.path.join(args.build, "bench", "load"), "--mib", str(args.mib), "--make", model], check=True)
        for adopt, kills in (("sample", args.kills), ("verify", 1), ("never", 1)):
            d = Daemon(args, folder, model, "--adopt", adopt)
            daemons.append(d)
            work = Work(exl3, d.ctl[2])
            nr_bytes = d.status()["weight_bytes"]
            for _ in range(kills):
                time.sleep(1.2)
                gone, seconds = work.after_kill(d.status()["worker_pid"])
                rows.append((args.backend, nr_bytes, adopt, f"{d.load_seconds:.3f}", f"{gone:.4f}", f"{seconds:.4f}"))
                print(*rows[-1], flush=True)
            adopted = d.words().count("ready, adopted")
            if adopt != "never" and adopted != kills:
                sys.exit(f"{adopted} of {kills} workers have adopted the weights: {d.words()[-3000:]}")
            work.client.close()
            d.stop()
    finally:
        for d in daemons:
            if d.proc.poll() is None:
                d.proc.kill()  # its workers follow it
                d.proc.wait()
        shutil.rmtree(folder, ignore_errors=True)
    commit = os.environ.get("EXL3_COMMIT") or subprocess.run(["git", "-C", HERE, "rev-parse", "--short=12", "HEAD"],
                                                              capture_output=True, text=True).stdout.strip()
    out = args.output or os.path.join(HERE, "results", f"recovery_{args.backend}.csv")
    with open(out, "w") as f:
        f.write(f"# {' '.join(sys.argv)}\n"
                f"# commit {commit}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime())} UTC\n"
                f"# {machine(args)}, Linux {platform.release()}\n"
                "# seconds from SIGKILL of the worker until the client sees it, until its next correct answer; load: start to ready\n"
                "backend,weight_bytes,adopt,load_seconds,gone_seconds,answer_seconds\n")
        f.writelines(",".join(map(str, row)) + "\n" for row in rows)


if __name__ == "__main__":
    main()
