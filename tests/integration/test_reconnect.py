# SPDX-License-Identifier: Apache-2.0
"""Clients that go on when the worker is gone: everything they had open is there again, or they are told why not."""
import json
import os
import shutil
import signal

import test_hostile as hostile
from harness import WAIT, Survivor, check, equal, kill_under, wait_for

MODEL, MODULE = "tiny-llama", "model.layers.0.mlp.down_proj"


def survivor(env, d, threads, *args):
    return Survivor(env, d.sock, MODEL, MODULE, str(threads), *args)


def kill_worker(d, known):
    pid = wait_for(lambda: new_worker(d, known), "a worker")
    os.kill(pid, signal.SIGKILL)
    known.append(pid)


def new_worker(d, known):
    rc, out, _ = d.ctl("status", "--json")
    pid = json.loads(out)["worker_pid"] if rc == 0 else 0
    return pid if pid not in known else 0


def test_goes_on_after_the_worker_is_killed(env):
    d = env.daemon((f"{MODEL}={env.model(MODEL)}",), ["--restart-limit", "20", "--restart-window", "600"])
    before = d.settled()
    rounds = 2 if env.short else 4
    survivors = {survivor(env, d, 3): 3, survivor(env, d, 1, "manual"): 1}
    for i in range(rounds):
        kill_under(d.worker_pid(), survivors)
        for s, threads in survivors.items():
            wait_for(lambda s=s, n=threads * (i + 1): s.backs == n, f"{s.args}, which is served again")
    for s, threads in survivors.items():
        got = s.end()
        equal(got["reconnects"], threads * rounds, "reconnections")
        check(got["stale"] >= threads * rounds, f"{got['stale']} requests were outstanding")
    equal(d.status()["errors"], 0, "errors at the last worker")
    after = d.settled()
    equal(after["fds"], before["fds"], "descriptors of the last worker when the clients have left")


def test_other_content(env):
    """The model was loaded anew with other content: the client is told, and no request of it is served."""
    folder = env.path("swapped")
    shutil.copytree(env.model(MODEL), folder)
    d = env.daemon((f"{MODEL}={folder}",))
    proc = survivor(env, d, 2, "paused").proc
    d.ctl_ok("unload", MODEL)
    d.ctl_ok("load", f"{MODEL}={env.model('tiny-deepseek')}")
    kill_worker(d, [])
    d.wait_ready()
    proc.stdin.write("go\n")
    proc.stdin.flush()
    equal(proc.wait(WAIT), 1, "status")
    err = proc.stderr.read()
    check("exl3_reconnect: -116" in err and "other content" in err, f"it says: {err}")


def test_adopted_memory_is_checked(env):
    d = env.daemon((f"{MODEL}={env.model(MODEL)}",))
    before = d.settled()
    rc, out, err = env.run(env.program("tests/integration/adopt"), d.sock, MODEL, "model.layers.0.mlp.down_proj")
    equal(rc, 0, f"adopt ({out.strip()} {err.strip()})")
    d.wait_held(before, "after adopt")


def test_adopted_memory_counts(env):
    """Memory that comes back with its client counts against memory-max as all other: no more than that, no longer."""
    d = env.daemon((f"layers={env.model('layers')}",), ["--memory-max", "32M"])
    hostile.neighbour(env, d, "before")
    before = d.settled()
    rc, out, err = env.run(env.program("tests/integration/adopt"), d.sock, str(1 << 30))
    equal(rc, 0, f"adopt ({out.strip()} {err.strip()})")
    hostile.neighbour(env, d, "after arenas that came back and went")
    d.wait_held(before, "after adopt")
