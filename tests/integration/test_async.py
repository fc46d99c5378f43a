# SPDX-License-Identifier: Apache-2.0
"""Many requests in flight through libexl3: order, poll, full rings, deadlines, cancellation, closed handles."""
import subprocess

from harness import Skipped, WAIT, check, equal

MODULE = ("tiny-llama", "model.layers.0.mlp.down_proj")


def run(env, command):
    d = env.shared()
    before = d.settled()
    rc, out, err = env.run(env.program("tests/integration/async"), d.sock, *MODULE, command, timeout=200)
    equal(rc, 0, f"async {command} ({out.strip()} {err.strip()})")
    d.wait_held(before, f"after async {command}")


def test_order_and_poll(env):
    run(env, "order")


def test_full_ring(env):
    run(env, "full")


def test_deadlines(env):
    run(env, "deadline")


def test_cancel(env):
    run(env, "cancel")


def test_module_closed_in_flight(env):
    run(env, "closed")


def test_a_greedy_client_does_not_block_a_small_one(env):
    """Channels take turns: three short requests are done before sixty long ones that came earlier."""
    if env.short:
        raise Skipped("takes long in an instrumented build")
    if env.backend != "cpu":
        raise Skipped("a GPU is done with the sixty before the second client has started")
    d = env.shared()
    before = d.settled()
    program = env.program("tests/integration/async")
    greedy = env.spawn(program, d.sock, *MODULE, "greedy", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                       stderr=subprocess.PIPE, text=True)
    equal(greedy.stdout.readline().strip(), "holding", "greedy")
    rc, _, err = env.run(program, d.sock, *MODULE, "small", timeout=WAIT)
    equal(rc, 0, f"small ({err.strip()})")
    out, err = greedy.communicate(timeout=2 * WAIT)
    equal(greedy.returncode, 0, f"greedy ({err.strip()})")
    check(int(out.split("=")[1]) < 60, f"the small client had to wait for all of the greedy one's requests: {out.strip()}")
    d.wait_held(before, "after both")
