# SPDX-License-Identifier: Apache-2.0
"""Many requests in flight through libexl3: order, poll, full rings, deadlines, cancellation, closed handles."""
from harness import equal


def run(env, command):
    d = env.shared()
    before = d.settled()
    rc, out, err = env.run(env.program("tests/integration/async"), d.sock, "tiny-llama", "model.layers.0.mlp.down_proj",
                           command, timeout=200)
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
