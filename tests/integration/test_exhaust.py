# SPDX-License-Identifier: Apache-2.0
"""Every allocation, descriptor and send of the daemon's code fails once, wherever it is: what met it is told, nothing else.

tests/preload/exhaust.c makes the n-th such call fail. So these scenarios need no list of fault points, and know those that
will be written later.
"""
import mmap
import os
import struct
import time

import exl3ref as ref
from harness import Skipped, check, equal, wait_for

DEVICE = False


class Exhaust:
    """The file that the preloaded library looks at."""

    def __init__(self, env, process):
        library = os.path.join(env.build, "tests", "libexhaust.so")
        if not os.path.exists(library):
            raise Skipped("the allocator is the sanitizer's")
        path = env.path(f"exhaust-{time.monotonic_ns()}")
        with open(path, "wb") as f:
            f.write(bytes(24 + 16) + process.encode().ljust(16, b"\0"))
        with open(path, "r+b") as f:
            self.map = mmap.mmap(f.fileno(), 56)
        self.environ = {"LD_PRELOAD": library, "EXHAUST": path}

    def arm(self, nth):
        self.map[:24] = struct.pack("QQQ", 0, 0, 0)
        self.map[:8] = struct.pack("Q", nth)

    def disarm(self):
        """(calls, what has failed and where, or nothing)."""
        self.map[:8] = struct.pack("Q", 0)
        count, where = struct.unpack("QQ", self.map[8:24])
        return count, f"{self.map[24:40].rstrip(bytes(1)).decode()} at {where:#x}" if where else ""


def x_file(env):
    path = env.path("x.npy")
    if not os.path.exists(path):
        ref.npy_save(path, "<f4", (1, 256), [0.01 * i for i in range(256)])
    return path


def request(env, d):
    return d.ctl("run", "linear", "layers", "k4.mul1", x_file(env), "-o", env.path("y.npy"))


def well(env, d, pid, what):
    """The next one is served, by the same worker."""
    rc, _, err = request(env, d)
    equal((rc, err), (0, ""), f"the request after {what}")
    equal(d.worker_pid(), pid, f"worker after {what}")


def sweep(env, process, action, step=1, after=lambda d: None):
    """Fails the 1st, 2nd, ... call that the action brings about, until it meets none. Returns what has failed.
    after: undoes what the action did, or had begun."""
    x = Exhaust(env, process)
    d = env.daemon(("layers",), environ=x.environ, args=["--restart-limit", "1000"])
    for _ in range(2):  # what the first use of a path allocates for good is there afterwards
        rc, _, err = action(d)
        equal(rc, 0, f"without a failure ({err.strip()})")
        after(d)
    well(env, d, d.worker_pid(), "two that went well")
    before, pid, met = d.settled(), d.worker_pid(), []
    n = 1
    while True:
        x.arm(n)
        rc, _, err = action(d)
        _, failed = x.disarm()
        what = f"call {n}: {failed}"
        after(d)
        if not failed:
            break
        met.append(failed)
        # Some are made up for: then all is as if nothing had happened.
        check(rc in (0, 3, 4, 5) and (rc == 0) == (not err.strip()), f"{what}: status {rc}, '{err.strip()}'")
        well(env, d, pid, what)
        n += step
    equal(rc, 0, f"when no call has failed any more ({err.strip()})")
    d.wait_held(before, f"after {len(met)} failures")
    equal(d.stop(), 0, "status after SIGTERM")
    return met


def test_a_request_that_meets_a_failure(env):
    """From the connection to the result, in the worker."""
    met = sweep(env, "exl3-worker", lambda d: request(env, d), 3 if env.short else 1)
    check(len(met) >= 10, f"only these have failed: {met}")


def test_a_connection_that_meets_a_failure(env):
    """The same in the supervisor, through which it goes."""
    met = sweep(env, "exl3-daemon", lambda d: request(env, d))
    check(met, "nothing has failed")


def test_questions_that_meet_a_failure(env):
    """What an administrator may ask, of the worker and of the supervisor."""
    def ask(d):
        for words in (("status",), ("ps",), ("modules", "layers"), ("tenants",), ("events",), ("domains",), ("fds",)):
            told = d.ctl(*words)
            if told[0]:
                break
        return told
    for process in ("exl3-worker", "exl3-daemon"):
        sweep(env, process, ask, 5 if env.short else 1)


def test_a_load_that_meets_a_failure(env):
    """A model that could not be loaded is refused with a reason; what it had taken is given back."""
    def unload(d):
        d.ctl("unload", "more")  # or what is left of one that failed
        wait_for(lambda: all(m["name"] != "more" for m in d.status()["models"]), "the model to go")
    for process in ("exl3-worker", "exl3-daemon"):
        sweep(env, process, lambda d: d.ctl("load", f"more={env.model('layers')}"), after=unload)
