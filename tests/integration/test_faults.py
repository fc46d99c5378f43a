# SPDX-License-Identifier: Apache-2.0
"""Allocations and system calls of the daemon that fail on purpose (daemon/fault.h): one request fails, nothing else."""
import json
import os
import signal
import time

import exl3ref as ref
from harness import MODELS, check, equal, wait_for

DEVICE = False

LAYERS = "layers=" + os.path.join(MODELS, "layers")

# Points that a request passes, and what exl3ctl may say about the one that met the failure.
POINTS = {
    "peer.new": (4,),
    "domain.client": (4,),
    "control.alloc": (3, 4, 5),
    "peer.handles": (3,),
    "channel.ring": (3,),
    "channel.eventfd": (3,),
    "arena.new": (3,),
    "dispatch.submit": (3,),
}


def one_request(env, d):
    x = env.path("x.npy")
    ref.npy_save(x, "<f4", (1, 256), [0.01 * i for i in range(256)])
    rc, _, err = d.ctl("run", "linear", "layers", "k4.mul1", x, "-o", env.path("y.npy"))
    return rc, err


def status_of(d):
    """The failure may meet this connection too, but no second one."""
    rc, out, _ = d.ctl("status", "--json")
    return json.loads(out) if rc == 0 else d.status()


def sweep(env, point):
    """Fails the 1st, 2nd, ... hit until two runs of requests met none."""
    clean, met = 0, False
    for n in range(1, 400, 7 if env.short else 1):
        d = env.daemon((LAYERS,), environ={"EXL3_FAULT": f"{point}:{n}"}, wait=False)
        wait_for(lambda d=d: " serves on " in d.log(), "worker that serves")
        failed = [r for r in (one_request(env, d) for _ in range(4)) if r[0] != 0]
        for rc, err in failed:
            check(rc in POINTS[point] and err.strip(), f"{point}:{n}: status {rc}, '{err.strip()}'")
        check(len(failed) <= 1, f"{point}:{n}: more than one request failed: {failed}")
        # All that the failed one held is back, and the worker is the first one.
        status = status_of(d)
        equal((status["channels"], status["clients"]), (0, 1), f"{point}:{n}: channels and clients")
        wait_for(lambda d=d: status_of(d)["arena_bytes"] == 0, f"{point}:{n}: arenas freed")
        check("generation 2" not in d.log(), f"{point}:{n}: the worker died: {d.log()[-1000:]}")
        equal(d.stop(), 0, f"{point}:{n}: status after SIGTERM")
        clean, met = (0, True) if failed else (clean + 1, met)
        if clean == 2:
            check(met, f"{point}: no request met a failure")
            return
    check(False, f"{point}: every run met a failure")


def test_a_failed_connection(env):
    sweep(env, "peer.new")


def test_a_client_that_the_supervisor_cannot_hold(env):
    sweep(env, "domain.client")


def test_a_client_that_cannot_be_handed_on_at_once(env):
    for n in (1, 2, 3):
        d = env.daemon((LAYERS,), environ={"EXL3_FAULT": f"domain.hand_on:{n}:2"})
        equal([one_request(env, d)[0] for _ in range(3)], [0] * 3, f"requests with domain.hand_on:{n}")
        equal(d.stop(), 0, "status after SIGTERM")


def test_a_worker_that_cannot_be_started(env):
    """The first one: the daemon says why and ends. A later one: it is tried again."""
    d = env.daemon((LAYERS,), environ={"EXL3_FAULT": "domain.start:1"}, wait=False)
    equal(d.wait_exit(), 1, "status")
    check("socketpair" in d.log(), f"the log does not say why: {d.log()}")
    d = env.daemon((LAYERS,), environ={"EXL3_FAULT": "domain.start:2:2"})
    os.kill(d.worker_pid(), signal.SIGKILL)
    wait_for(lambda: "generation 2" in d.log(), "second worker")
    equal(d.log().count("restarting the worker"), 3, "tries")
    equal(one_request(env, d)[0], 0, "a request")
    equal(d.stop(), 0, "status after SIGTERM")


def test_no_memory_for_a_message(env):
    sweep(env, "control.alloc")


def test_no_memory_for_a_handle(env):
    sweep(env, "peer.handles")


def test_no_memory_for_a_channel(env):
    sweep(env, "channel.ring")
    sweep(env, "channel.eventfd")


def test_no_memory_for_an_arena(env):
    sweep(env, "arena.new")


def test_a_launch_that_fails(env):
    sweep(env, "dispatch.submit")


def test_lost_device(env):
    """The worker makes room for another, whose clients know nothing of it."""
    d = env.daemon((LAYERS,), environ={"EXL3_FAULT": "dispatch.poll:1"}, wait=False)
    wait_for(lambda: " serves on " in d.log(), "worker that serves")
    rc, err = one_request(env, d)
    # Its worker leaves right after the answer; the answer counts.
    equal((rc, err.strip()), (3, "exl3ctl: the device failed"), "status of the request that met it")
    wait_for(lambda: "generation 2" in d.log(), "second worker")
    check("device 0 is lost" in d.log(), f"the log does not say so: {d.log()}")
    wait_for(lambda: any(e["kind"] == "died" and "device 0 is lost" in e["text"] for e in events(d)), "the event")
    equal(d.stop(), 0, "status after SIGTERM")


def events(d):
    return d.json("events")["events"]


def test_a_launch_that_never_ends(env):
    """Its client gets no result but the end of the connection; the next worker serves, and events say why."""
    d = env.daemon((LAYERS,), args=("--launch-timeout", "1"), environ={"EXL3_FAULT": "dispatch.hang:1:0"}, wait=False)
    wait_for(lambda: " serves on " in d.log(), "worker that serves")
    start = time.monotonic()
    rc, err = one_request(env, d)
    took = time.monotonic() - start
    equal(rc, 5, f"status of the request that never ended ({err.strip()})")
    check(took > 0.9, f"it took {took:.1f} s")
    wait_for(lambda: "generation 2" in d.log(), "second worker")
    d.wait_ready()
    died = [e for e in events(d) if e["kind"] == "died"]
    equal(len(died), 1, f"deaths in {events(d)}")
    check("a launch does not end" in died[0]["text"], f"the event does not say why: {died}")
    equal((died[0]["domain"], died[0]["generation"]), ("default", 1), "whose")
    equal(d.stop(), 0, "status after SIGTERM")


def test_a_loop_that_hangs(env):
    """A worker that says nothing for too long is killed and followed by another, with or without systemd."""
    d = env.daemon((LAYERS,), args=("--hang-timeout", "2"))
    pid = d.worker_pid()
    os.kill(pid, signal.SIGSTOP)
    wait_for(lambda: "generation 2" in d.log(), "second worker")
    d.wait_ready()
    check(f"worker {pid} hangs" in d.log(), f"the log does not say so: {d.log()[-600:]}")
    check(any("hang-timeout" in e["text"] for e in events(d) if e["kind"] == "died"), f"events: {events(d)}")
    equal(one_request(env, d)[0], 0, "status of a request")
    time.sleep(5)  # one that is well stays
    check("generation 3" not in d.log(), f"a worker that was well was killed: {d.log()[-600:]}")
    equal(d.stop(), 0, "status after SIGTERM")


def test_events(env):
    """What happened, in order, also before the worker that answers was there; the text for people too."""
    d = env.daemon((LAYERS,), args=("--restart-limit", "1000"))
    for n in (1, 2):
        os.kill(d.worker_pid(), signal.SIGKILL)
        wait_for(lambda n=n: f"generation {n + 1}" in d.log(), "next worker")
        d.wait_ready()
    wait_for(lambda: sum(e["kind"] == "ready" for e in events(d)) == 3, "the last event")
    seen = [(e["generation"], e["kind"]) for e in events(d)]
    equal(seen, [(g, k) for g in (1, 2, 3)
                 for k in ("started", "loaded" if g == 1 else "adopted", "ready", "died")][:-1], "events")
    ids = [e["id"] for e in events(d)]
    equal(ids, sorted(set(ids)), "their numbers")
    now = time.time() * 1000
    check(all(now - 600000 < e["time_ms"] <= now + 1000 for e in events(d)), f"their times: {events(d)}")
    text = d.ctl_ok("events")
    equal(text.count("killed by signal 9"), 2, f"deaths in {text}")
    equal(d.stop(), 0, "status after SIGTERM")


def test_a_point_that_cannot_be_read(env):
    d = env.daemon((LAYERS,), environ={"EXL3_FAULT": "nonsense"})
    check("is not name:n" in d.log(), "a broken EXL3_FAULT is not reported")
    equal(one_request(env, d)[0], 0, "status of a request")
