# SPDX-License-Identifier: Apache-2.0
"""Plans: calls that are recorded once and replayed by one entry."""
import os
import signal
import subprocess

from harness import check, equal, wait_for

MODELS = ("tiny-llama", "tiny-deepseek")


def plans(env, d, *args):
    rc, _, err = env.run(env.program("tests/integration/plans"), d.sock, *args)
    equal(rc, 0, f"plans {args[0]}: {err.strip()}")


def spawn(env, d, command):
    proc = env.spawn(env.program("tests/integration/plans"), d.sock, command, stdin=subprocess.PIPE,
                     stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    line = proc.stdout.readline().strip()
    if line != "ready":
        check(False, f"plans {command}: {line} {proc.stderr.read()}")
    return proc


def end(proc, what):
    _, err = proc.communicate(timeout=60)
    equal(proc.returncode, 0, f"{what}: {err.strip()}")


def test_a_thousand_replays(env):
    d = env.shared()
    before = d.settled()
    plans(env, d, "same", "5" if env.short else "50")
    plans(env, d, "small", "50" if env.short else "1000")
    d.wait_held(before, "plans")


def test_in_the_order_of_a_stream(env):
    d = env.shared()
    before = d.settled()
    plans(env, d, "streams")
    d.wait_held(before, "plans of streams")


def test_what_cannot_be_recorded(env):
    d = env.shared()
    before = d.settled()
    plans(env, d, "refused")
    plans(env, d, "failed")
    d.wait_held(before, "plans")


def test_plans_of_several_clients_share_launches(env):
    d = env.daemon(MODELS, ("--merge-max", "8", "--queue-depth", "1", "--chunk-us", "0"))
    plans(env, d, "together", str(d.worker_pid()))
    m = d.status()["merging"]
    check(m.get("merged", 0) > 240, f"{m.get('merged', 0)} of 480 calls of plans were in a launch with others")


def test_a_plan_does_not_keep_its_model(env):
    d = env.daemon(MODELS)
    proc = spawn(env, d, "unloaded")
    d.ctl_ok("unload", "--wait", "tiny-deepseek")
    proc.stdin.write("go\n")
    proc.stdin.flush()
    end(proc, "after unload")


def test_plans_are_there_at_the_next_worker(env):
    d = env.daemon(MODELS)
    proc = spawn(env, d, "stale")
    os.kill(d.worker_pid(), signal.SIGKILL)
    end(proc, "after the worker's death")


def test_a_client_dies_in_a_replay(env):
    d = env.shared()
    before = d.settled()
    for _ in range(3 if env.short else 20):
        proc = spawn(env, d, "busy")
        requests = d.status()["requests"]
        wait_for(lambda: d.status()["requests"] > requests, "replays")
        equal([(c["mode"], c["plans"]) for c in d.json("ps")["clients"] if c["pid"] == proc.pid], [("plan", 1)], "ps")
        proc.kill()
        proc.wait()
    d.wait_held(before, "clients that died in replays")
    plans(env, d, "same", "3")


def test_a_recording_that_fails(env):
    """Without memory for a part of it: nothing of it stays, whatever was recorded before."""
    for fault in ("replay.count", "replay.new", "replay.calls", "replay.models"):
        d = env.daemon(MODELS, environ={"EXL3_FAULT": f"{fault}:1"})
        plans(env, d, "no_memory")
        equal(len([e for e in d.json("events")["events"] if e["kind"] == "died"]), 0, f"{fault}: workers that died")


def test_rows_of_a_tenant(env):
    """A plan's longest call counts against the rows in flight."""
    conf = env.path("plans.conf")
    with open(conf, "w", encoding="ascii") as f:
        f.write("[tenant default]\nrows = 2\n")
    d = env.daemon(MODELS, ("--config", conf))
    plans(env, d, "same", "3")
