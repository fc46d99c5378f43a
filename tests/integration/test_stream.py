# SPDX-License-Identifier: Apache-2.0
"""Stream calls: ready and done words, with the host in the place of a CUDA stream."""
import os
import signal
import subprocess
import time

from harness import check, equal, wait_for

MODEL, MODULE = "tiny-llama", "model.layers.0.self_attn.qkv_proj"


def stream(env, d, command):
    rc, _, err = env.run(env.program("tests/integration/stream"), d.sock, MODEL, MODULE, command)
    check(rc == 0, f"stream {command}: {err.strip()}")


def spawn(env, d, command):
    proc = env.spawn(env.program("tests/integration/stream"), d.sock, MODEL, MODULE, command,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = proc.stdout.readline().strip()
    if line != "ready":
        check(False, f"stream {command}: {line} {proc.stderr.read()}")
    return proc


def test_a_call_starts_when_it_is_ready(env):
    d = env.shared()
    before = d.settled()
    for command in ("calls", "order", "refused"):
        stream(env, d, command)
    d.wait_held(before, "stream calls")


def test_a_call_that_is_late_ends(env):
    stream(env, env.shared(), "late")


def test_a_call_that_is_never_ready_ends(env):
    d = env.daemon((MODEL,), ["--ready-timeout", "1"])
    stream(env, d, "never")


def test_a_call_that_is_never_ready_does_not_hold_up_the_end(env):
    """SIGTERM waits for what was accepted, not for what a client never says."""
    d = env.daemon((MODEL,), ["--drain-timeout", "3600", "--ready-timeout", "3600"])
    proc = spawn(env, d, "silent")
    equal(d.stop(), 0, "status after SIGTERM")
    proc.kill()


def test_numbers_of_calls_wrap(env):
    stream(env, env.shared(), "wrap")


def test_64_channels_with_calls(env):
    d = env.shared()
    before = d.settled()
    stream(env, d, "many")
    d.wait_held(before, "many channels")


def test_a_client_that_never_signals_is_killed(env):
    d = env.shared()
    before = d.settled()
    for _ in range(env.loops):
        procs = [spawn(env, d, "silent") for _ in range(2)]
        stream(env, d, "calls")  # others go on
        for proc in procs:
            proc.kill()
    d.wait_held(before, "clients that never signal")


def test_a_client_that_never_signals_costs_little(env):
    """The loop looks at the words now and then, it does not spin for ever."""
    d = env.daemon((MODEL,))
    proc = spawn(env, d, "silent")
    pid = d.worker_pid()

    def ticks():
        with open(f"/proc/{pid}/stat") as f:
            fields = f.read().rsplit(")", 1)[1].split()
        return int(fields[11]) + int(fields[12])

    def idle():
        start = ticks()
        time.sleep(1.0)
        check(proc.poll() is None, "the client has ended")
        return ticks() - start < 0.5 * os.sysconf("SC_CLK_TCK")
    wait_for(idle, "less than half a processor for calls that are never ready")


def test_streams_go_on_when_the_worker_is_gone(env):
    d = env.daemon((MODEL,))
    proc = spawn(env, d, "stale")
    os.kill(d.worker_pid(), signal.SIGKILL)
    _, err = proc.communicate(timeout=120)
    equal(proc.returncode, 0, f"stream stale ({err.strip()})")
