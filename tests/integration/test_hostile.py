# SPDX-License-Identifier: Apache-2.0
"""Clients that break every rule: only they suffer, and all that they held comes back."""
import os
import resource
import signal
import socket
import struct
import subprocess
import time

import exl3ref as ref
from harness import Failed, WAIT, check, equal, wait_for
from test_linear import near

MODEL, MODULE = "tiny-llama", "model.layers.0.mlp.down_proj"


def hostile(env, d, *args, seconds=120):
    rc, out, err = env.run(env.program("tests/integration/hostile"), d.sock, *args, timeout=seconds)
    check(rc == 0, f"hostile {args[0]}: status {rc}: {out.strip()} {err.strip()}")
    return out


def neighbour(env, d, what):
    """Somebody else is served, with right results."""
    x = env.path("n.npy")
    if not os.path.exists(x):
        ref.npy_save(x, "<f4", (1, 256), [0.5] * 256)
    d.ctl_ok("run", "linear", "layers", "k4.mul1", x, "-o", env.path("n-out.npy"), timeout=WAIT)
    got = ref.npy_load(env.path("n-out.npy"))[2]
    if not hasattr(env, "neighbour_y"):
        env.neighbour_y = ref.Matrix(ref.load(f"{env.model('layers')}/layers.safetensors"), "k4.mul1").apply([0.5] * 256)
    near(got, env.neighbour_y, "f4", f"{what}: the neighbour's result")


def holding(env, d, *args, program="hostile"):
    """Starts one that holds its bad state; returns the process."""
    proc = env.spawn(env.program(f"tests/integration/{program}"), d.sock, *args, stdin=subprocess.PIPE,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    lines = []
    while True:
        line = proc.stdout.readline()
        if not line:
            proc.wait()
            check(False, f"hostile {args[0]}: status {proc.returncode}: {' '.join(lines)} {proc.stderr.read().strip()}")
        if line.strip() == "holding":
            return proc
        lines.append(line.strip())


def let_go(proc, what):
    out, err = proc.communicate(timeout=WAIT)
    check(proc.returncode == 0, f"{what}: status {proc.returncode}: {out.strip()} {err.strip()}")


def held_between(env, *args):
    """One that holds: the neighbours are served meanwhile, everything comes back afterwards."""
    d = env.shared()
    neighbour(env, d, "before")
    before = d.settled()
    proc = holding(env, d, *args)
    for _ in range(3):
        neighbour(env, d, args[0])
    d.ctl_ok("status")
    let_go(proc, args[0])
    d.wait_held(before, f"after {args[0]}")


def run_between(env, *args):
    d = env.shared()
    neighbour(env, d, "before")
    before = d.settled()
    out = hostile(env, d, *args)
    neighbour(env, d, f"after {args[0]}")
    d.wait_held(before, f"after {args[0]}")
    return out


def test_broken_entries(env):
    run_between(env, "entries", MODEL, MODULE)


def test_garbage_entries(env):
    for seed in range(1 if env.short else 4):
        run_between(env, "garbage", MODEL, MODULE, str(seed + 1), "500" if env.short else "5000")


def test_impossible_ring_words(env):
    run_between(env, "words", MODEL, MODULE)


def test_full_completion_queue(env):
    held_between(env, "nodrain", MODEL, MODULE)


def test_full_eventfd_and_a_flood_of_kicks(env):
    held_between(env, "kicks", MODEL, MODULE)


def test_full_notification_socket(env):
    held_between(env, "notify", MODEL, MODULE)


def test_tampering_with_descriptors(env):
    run_between(env, "seals", MODEL, MODULE, "model.norm.weight")


def test_garbage_packets(env):
    for seed in range(1 if env.short else 4):
        run_between(env, "packets", str(seed + 1), "200" if env.short else "2000")


def test_surplus_descriptors(env):
    for count in ("1", "8", "9", "253"):
        held_between(env, "surplus", count)


def lingering_socket():
    """A TCP socket whose last close waits for an hour, as its other end does not read; and that other end."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        sock = socket.create_connection(listener.getsockname())
        other = listener.accept()[0]
    sock.setblocking(False)
    try:
        while True:
            sock.send(bytes(65536))
    except BlockingIOError:
        pass
    sock.setblocking(True)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 3600))
    return sock, other


def connected(d):
    client = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    client.settimeout(WAIT)
    client.connect(d.sock)
    return client


def test_descriptors_whose_close_hangs(env):
    """Whoever closes them last waits: never the thread that serves the others."""
    d = env.shared()
    neighbour(env, d, "before")
    before = d.settled()
    for packets in ((b"\xff",), (b"\xff", b"\xff"), (bytes(70000),)):  # it is read; left unread; too long
        what = f"beside a close that hangs, {len(packets)} packets of {len(packets[0])} bytes"
        sock, other = lingering_socket()
        client, victim = connected(d), connected(d)
        wait_for(lambda: d.status()["clients"] == before["clients"] + 2, "two more clients")
        # All is there before it goes on: a later event would interrupt the close.
        pid = int(before_pid(d))
        os.kill(pid, signal.SIGSTOP)
        try:
            for i, packet in enumerate(packets):
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", sock.fileno()))]
                client.sendmsg([packet], rights if i == len(packets) - 1 else [])
            sock.close()  # the daemon's copy is the last one
            victim.send(b"\xff")
        finally:
            os.kill(pid, signal.SIGCONT)
        try:
            check(victim.recv(65536), f"{what}: no answer")
        except TimeoutError:
            raise Failed(f"{what}: no answer within {WAIT:g} s") from None
        neighbour(env, d, what)
        for s in (other, client, victim):  # the connection is reset: nothing to wait for any more
            s.close()
        d.wait_held(before, "after a close that hung")


def test_log_flood(env):
    """What a client can do without an end does not fill the log."""
    d = env.shared()
    before = d.held()
    lines = d.log().count("\n")
    for _ in range(500):
        client = connected(d)
        client.send(bytes(70000))
        check(not client.recv(65536), "a packet that is too long was answered")
        client.close()
    equal(d.log().count("\n") - lines < 100, True, "fewer than 100 lines for 500 packets that are too long")
    neighbour(env, d, "after a flood of packets that are too long")
    d.wait_held(before, "after a flood of packets that are too long")


def test_ids_and_slots_that_lie_or_change(env):
    d = env.shared()
    neighbour(env, d, "before")
    before = d.settled()
    rc, out, err = env.run(env.program("tests/integration/indices"), d.sock, "tiny-deepseek", "model.layers.1.mlp",
                           "50" if env.short else "1000", timeout=200)
    equal(rc, 0, f"indices ({out.strip()} {err.strip()})")
    neighbour(env, d, "after indices")
    d.wait_held(before, "after indices")


def test_hello_rules(env):
    run_between(env, "hello")


def test_one_that_never_reads(env):
    held_between(env, "deaf", MODEL)


def test_limits(env):
    d = env.daemon((f"{MODEL}={env.model(MODEL)}", f"layers={env.model('layers')}"),
                   ["--arena-max", "16M", "--channels-max", "3", "--clients-max", "6"])
    before = d.settled()
    rc, out, err = env.run(env.program("tests/integration/limits"), d.sock, "16777216", "3", MODEL, MODULE, timeout=200)
    equal(rc, 0, f"limits ({out.strip()} {err.strip()})")
    d.wait_held(before, "after limits")
    # The daemon is full: newcomers are told so, not left waiting; those inside are served.
    procs = [holding(env, d, "idle", program="limits") for _ in range(6)]
    rc, _, err = d.ctl("status", timeout=WAIT)
    check(rc in (3, 4) and err.strip(), f"one client too many: status {rc}, {err}")
    for proc in procs:
        let_go(proc, "idle")
    neighbour(env, d, "after one client too many")
    d.wait_held(before, "after many clients")


def test_few_descriptors(env):
    """A daemon that runs out of descriptors refuses what it cannot serve, keeps the rest, and recovers."""
    d = env.daemon((f"{MODEL}={env.model(MODEL)}", f"layers={env.model('layers')}"), ["--arena-max", "16M"],
                   nofile=48 if env.backend == "cpu" else 128)
    before = d.settled()
    program = env.program("tests/integration/limits")
    procs = [env.spawn(program, d.sock, "idle", stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
             for _ in range(60)]
    time.sleep(1)
    check(d.proc.poll() is None and os.path.exists(f"/proc/{before_pid(d)}"), f"the daemon ended: {d.log()[-500:]}")
    for proc in procs:
        proc.kill()
        proc.wait()
    neighbour(env, d, "after too many clients for the descriptors")
    rc, _, err = env.run(program, d.sock, "16777216", "64", MODEL, MODULE, timeout=100)
    check(rc in (0, 1), f"limits: status {rc}, {err}")  # it may be refused early; the daemon must not mind
    neighbour(env, d, "after one client that wants all descriptors")
    d.wait_held(before, "after descriptors ran out")


def test_waiting_for_descriptors_costs_little(env):
    """Out of descriptors with somebody in the queue of each socket: nobody spins until there are some again."""
    d = env.daemon((f"layers={env.model('layers')}",), nofile=48 if env.backend == "cpu" else 128)
    pids = (d.proc.pid, int(before_pid(d)))
    before = d.settled()
    procs = [env.spawn(env.program("tests/integration/limits"), d.sock, "idle", stdin=subprocess.PIPE,
                       stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) for _ in range(60)]
    time.sleep(1)
    # The supervisor passes its clients on and has descriptors left: those it may open at all are cut down.
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (5, resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]))
    queued = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM), socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)]
    queued[0].connect(d.sock + ".metrics")
    queued[1].connect(d.sock + ".admin")

    def ticks():
        total = 0
        for pid in pids:
            with open(f"/proc/{pid}/stat") as f:
                fields = f.read().rsplit(")", 1)[1].split()
            total += int(fields[11]) + int(fields[12])
        return total

    def idle():
        start = ticks()
        time.sleep(1.0)
        return ticks() - start < 0.3 * os.sysconf("SC_CLK_TCK")
    wait_for(idle, "less than a third of a processor for connections that cannot be taken")
    for pid in pids:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (48, 48) if env.backend == "cpu" else (128, 128))
    for proc in procs:
        proc.kill()
        proc.wait()
    queued[1].send(b"domains")
    queued[1].settimeout(WAIT)
    check(b"default" in queued[1].recv(4096), "the supervisor does not answer any more")
    queued[0].send(b"GET /metrics HTTP/1.1\r\n\r\n")
    queued[0].settimeout(WAIT)
    check(queued[0].recv(4096).startswith(b"HTTP/1.1 200"), "the metrics do not answer any more")
    for s in queued:
        s.close()
    neighbour(env, d, "after descriptors ran out")
    d.wait_held(before, "after descriptors ran out")


def before_pid(d):
    """The worker, without a connection of our own."""
    with open(f"/proc/{d.proc.pid}/task/{d.proc.pid}/children") as f:
        children = f.read().split()
    for pid in children:
        with open(f"/proc/{pid}/comm") as f:
            if f.read().strip() == "exl3-worker":
                return pid
    return "gone"


def test_memory_limit(env):
    """memory-max: what does not fit is refused with what it needs, and what serves goes on."""
    d = env.daemon((f"layers={env.model('layers')}",), ["--memory-max", "4M", "--gpu-memory-max", "4M",
                                                           "--arena-max", "16M"])
    before = d.settled()
    rc, _, err = d.ctl("load", f"llama={env.model(MODEL)}")
    equal(rc, 3, f"a model that does not fit ({err.strip()})")
    check(sum(c.isdigit() for c in err) >= 4, f"no numbers are given: {err}")
    neighbour(env, d, "after a model that does not fit")
    rc, _, err = env.run(env.program("tests/integration/limits"), d.sock, "16777216", "1", "layers", "k4.mul1")
    check(rc == 1 and "code -12" in err, f"an arena that does not fit: status {rc}, {err}")
    neighbour(env, d, "after an arena that does not fit")
    d.ctl("unload", "llama")  # a refused model stays listed until then
    d.wait_held(before, "after refusals for memory")


def test_killed_at_each_step(env):
    """dying.c kills itself at each step of the protocol, after different delays."""
    d = env.shared()
    program = env.program("tests/integration/dying")
    steps = env.run(program, "steps")[1].split()
    check(len(steps) >= 20, f"steps: {steps}")
    neighbour(env, d, "before")
    pid = d.worker_pid()
    for step in steps:  # once each, so that what the first use of a path allocates is there
        die(env, program, d, step, 0)
    before = d.settled()
    rss = d.rss_kib(pid)
    for round_ in range(env.loops):
        for i, step in enumerate(steps):
            die(env, program, d, step, 37 * (i + 7 * round_) % 1500)
        neighbour(env, d, f"round {round_ + 1}")
    d.wait_held(before, f"after {env.loops * len(steps)} deaths")
    equal(d.worker_pid(), pid, "worker")
    grown = d.rss_kib(pid) - rss
    check(grown < 2048 + 8 * env.loops or env.short, f"the worker has grown by {grown} KiB")


def die(env, program, d, step, delay_us):
    rc, out, err = env.run(program, d.sock, MODEL, MODULE, step, str(delay_us))
    equal((rc, out.strip()), (-signal.SIGKILL, step), f"dying at {step} ({err.strip()})")


def test_killed_clients_beside_a_working_one(env):
    """A language model's text does not change by the deaths around it."""
    d = env.shared()
    command = [env.program("examples/tiny_llama"), "--socket", d.sock, "generate", "--prompt", "The bridge over the river",
               "--tokens", "80" if env.short else "160"]
    rc, want, err = env.run(*command)
    equal(rc, 0, f"alone ({err})")
    writer = env.spawn(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    program, deaths = env.program("tests/integration/dying"), 0
    for step in ("running", "queued", "two", "asleep", "freed", "closed") * 2:
        die(env, program, d, step, 100 * deaths)
        deaths += 1
    out, err = writer.communicate(timeout=WAIT)
    equal(writer.returncode, 0, f"beside {deaths} deaths ({err})")
    equal(out, want, "text")
