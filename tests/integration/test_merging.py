# SPDX-License-Identifier: Apache-2.0
"""Requests of several channels in one launch: deterministic ones keep every bit."""
from harness import check, equal


def run(env, *args):
    """(requests, of them in a launch with others) of deterministic requests that come at once."""
    # No bound on a launch's time: in a slow build four rows would reach it.
    d = env.daemon(("tiny-llama", "tiny-deepseek"), ("--merge-max", "8", "--queue-depth", "1", "--chunk-us", "0", *args))
    rc, out, err = env.run(env.program("tests/integration/together"), d.sock, "20" if env.short else "100", str(d.worker_pid()))
    equal(rc, 0, f"client: {err.strip() or out.strip()}")
    m = d.status()["merging"]
    return m["requests"], m.get("merged", 0)


def test_deterministic_requests_meet(env):
    requests, merged = run(env)
    check(merged > requests / 2, f"{merged} of {requests} requests were in a launch with others")


def test_deterministic_daemon(env):
    requests, merged = run(env, "--deterministic", "yes")
    check(merged > requests / 2, f"{merged} of {requests} requests were in a launch with others")
