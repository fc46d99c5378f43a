# SPDX-License-Identifier: Apache-2.0
"""exl3_host.py - a linear layer of the daemon on memory that is anywhere in this process: it is copied through an arena.

    rows = exl3_host.Rows(client)
    rows.linear(module, exl3.F32, x, y)       # x [m, k] and y [m, n]: bytes-like, row-major; y is written

Operands that lie in an arena from the start (Client.arena(), exl3.Channel.linear()) save both copies. This is for
programs whose arrays are their framework's, as exl3_torch.py's tensors on the CPU are. Any thread; one at a time.
"""
import threading

import exl3

BYTES = {code: size for code, size, _ in exl3.TYPES.values()}


class Rows:
    """A channel, and room in an arena for some rows of the widest layer that came by; more rows go in several
    requests. Ends with its client."""

    def __init__(self, client, rows=512):
        self.client, self.rows = client, rows
        self._channel, self._lock = client.channel(), threading.Lock()
        self._arena, self._x, self._y = None, None, None

    def _reserve(self, x_bytes, y_bytes):
        if self._x and len(self._x.bytes) >= x_bytes and len(self._y.bytes) >= y_bytes:
            return
        if self._x:
            x_bytes, y_bytes = max(x_bytes, len(self._x.bytes)), max(y_bytes, len(self._y.bytes))
        arena = self.client.arena(x_bytes + y_bytes + 128)
        x, y = arena.array("e4m3", (x_bytes,)), arena.array("e4m3", (y_bytes,))  # bytes; each request says what they are
        if self._arena:
            self._arena.free()
        self._arena, self._x, self._y = arena, x, y

    def linear(self, module, dtype, x, y, **options):
        """y = x W. dtype: exl3.F32, F16 or BF16, of both. Options: flags, timeout_ns. ValueError: sizes do not fit."""
        x, y = memoryview(x).cast("B"), memoryview(y).cast("B")
        row_x, row_y = module.k * BYTES[dtype], module.n * BYTES[dtype]
        m = len(x) // row_x
        if len(x) != m * row_x or len(y) != m * row_y:
            raise ValueError(f"{len(x)} and {len(y)} bytes; {module.name} takes rows of {row_x} and gives rows of {row_y}")
        with self._lock:
            most = min(m, self.rows)
            if m:
                self._reserve(most * row_x, most * row_y)
            for at in range(0, m, self.rows):
                n = min(self.rows, m - at)
                self._x.bytes[:n * row_x] = x[at * row_x:(at + n) * row_x]
                self._channel.linear(module, exl3.Operand(self._x.ref, dtype, (n, module.k)),
                                     exl3.Operand(self._y.ref, dtype, (n, module.n)), **options)
                y[at * row_y:(at + n) * row_y] = self._y.bytes[:n * row_y]
