# SPDX-License-Identifier: Apache-2.0
"""The short form of chaos.py ('make check-chaos' is the long one)."""
import random

from chaos import Chaos


def test_chaos(env):
    Chaos(env, random.Random(20261130)).run(3 if env.short else 6)
