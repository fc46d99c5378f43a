# SPDX-License-Identifier: Apache-2.0
"""python_client.py SOCKET - exercises client/python/exl3.py; prints the outcome as JSON. Run by test_python.py."""
import errno
import json
import struct
import sys

import exl3
import exl3_host


def floats(array):
    return list(struct.unpack(f"<{len(array.bytes) // 4}f", array.bytes))


def fill(array, values):
    array.bytes[:] = struct.pack(f"<{len(values)}{'f' if array.dtype == 'f4' else 'i'}", *values)


def refused(call):
    try:
        call()
    except exl3.Error as e:
        return errno.errorcode[e.errno], e.strerror
    return "nothing"


def plans(out, channel, module, x, y):
    """Recorded, and replayed on other values."""
    with channel.record() as plan:
        channel.linear(module, x, y)
        channel.nop()
    single = floats(y)
    fill(y, [0.0] * len(single))
    out["plan"] = len(plan) == 2 and plan.run().result == 0 and floats(y) == single
    call = plan.run(stream=exl3.HOST)
    channel.ready(call)
    out["plan stream"] = channel.stream_result(call).result == 0
    plan.free()
    out["plan freed"] = len(plan) == 0
    try:
        with channel.record():
            channel.linear(module, x, y, timeout_ns=1)
        out["plan deadline"] = "nothing"
    except ValueError as e:
        out["plan deadline"] = str(e)


def main():
    out = {}
    with exl3.Client(sys.argv[1], "python") as client:
        model = client.model("layers")
        module = model.module("k4.mul1", exl3.LINEAR)
        out["module"] = [module.k, module.n, module.kind, module.shards]
        arena, channel = client.arena(1 << 20), client.channel(4)
        x, y = arena.array("f4", (2, module.k)), arena.array("f4", (2, module.n))
        fill(x, [((i * 37) % 101 - 50) / 25 for i in range(2 * module.k)])
        c = channel.linear(module, x, y)
        out["linear"], out["rows"] = floats(y), c.result
        out["x"] = floats(x)

        # Three at once, reaped in order; a poll loop's way to wait is there as well.
        numbers = [channel.linear(module, x, y, wait=False) for _ in range(3)]
        done = [channel.wait() for _ in numbers]
        out["in order"] = [c.user_data for c in done] == numbers and not any(c.result for c in done)
        out["nothing left"] = channel.wait() is None
        channel.nop()

        # What is refused before it is sent leaves nothing behind.
        other = client.channel(2)
        for _ in range(3):
            try:
                other.linear(module, x, y, timeout=5)
            except TypeError:
                pass
        fill(y, [0.0] * (2 * module.n))
        other.nop()
        out["refused leaves nothing"] = not any(floats(y))
        channel.linear(module, x, y)

        try:
            plans(out, client.channel(4), module, x, y)
        except exl3.Error as e:
            out["plan"] = errno.errorcode[e.errno]

        # In the order of a stream that is this program; more of them than the ring has room for.
        before = floats(y)
        fill(y, [0.0] * len(before))
        call = channel.linear(module, x, y, stream=exl3.HOST)
        out["waits"] = channel.stream_result(call, 20000000) is None and not any(floats(y))
        channel.ready(call)
        out["stream"] = channel.stream_result(call).result == 0 and floats(y) == before and channel.stream_error() is None
        calls = []
        for _ in range(100):
            calls.append(channel.nop(stream=exl3.HOST))
            channel.ready(calls[-1])
        out["stream order"] = [channel.stream_result(c).result for c in calls[-8:]] == [0] * 8 and \
            calls == list(range(call + 1, call + 101))
        late = channel.nop(stream=exl3.HOST, timeout_ns=1000000)
        out["stream late"] = [channel.stream_result(late).result, channel.stream_error(), late]

        # Memory that is this program's own, in requests of two rows: the same bits.
        rows = exl3_host.Rows(client, 2)
        mine, theirs = bytes(x.bytes[:4 * module.k]) * 5, bytearray(5 * 4 * module.n)
        rows.linear(module, exl3.F32, mine, theirs, flags=exl3.DETERMINISTIC)
        channel.linear(module, x, y, flags=exl3.DETERMINISTIC)
        out["rows of one's own"] = theirs == bytes(y.bytes[:4 * module.n]) * 5
        rows.linear(module, exl3.F32, b"", b"")
        wide = client.model("tiny-deepseek").module("lm_head")
        rows.linear(wide, exl3.F16, bytes(2 * wide.k), theirs_too := bytearray(b"x" * 2 * wide.n))
        out["wider ones"] = not any(struct.unpack(f"<{wide.n}e", theirs_too))
        rows.linear(module, exl3.F32, mine, theirs_again := bytearray(len(theirs)), flags=exl3.DETERMINISTIC)
        out["rows again"] = theirs_again == theirs
        try:
            rows.linear(module, exl3.F32, mine, theirs[1:])
            out["cut"] = "taken"
        except ValueError as e:
            out["cut"] = str(e)

        out["no module"] = refused(lambda: model.module("k4.nonesuch"))
        out["no model"] = refused(lambda: client.model("nonesuch"))
        out["deadline"] = refused(lambda: channel.linear(module, x, y, timeout_ns=1))
        try:
            channel.linear(module, y, x)
            out["shapes"] = "taken"
        except ValueError as e:
            out["shapes"] = str(e)

        t = model.tensor("input")
        out["tensor"] = [t.dtype, list(t.shape), len(t.data), t.data.readonly]
        t.close()

        deepseek = client.model("tiny-deepseek")
        moe = deepseek.module("model.layers.2.mlp", exl3.MOE)
        out["moe"] = [moe.k, moe.n, moe.experts]
        x, y = arena.array("f4", (1, moe.k)), arena.array("f4", (1, moe.n))
        ids, weights = arena.array("i4", (1, 3)), arena.array("f4", (1, 3))
        fill(x, [1.0] * moe.k)
        fill(ids, [-1, 999, -5])
        fill(weights, [1.0] * 3)
        out["skipped"] = channel.moe(moe, x, y, ids, weights).detail
        out["all holes"] = any(floats(y))
        # Two sequences with three and one queries, pages of four rows, a length for each query.
        tables, lengths = arena.array("i4", (2, 3)), arena.array("i4", (4,))
        q, cache, o = arena.array("f4", (4, 2, 32)), arena.array("f2", (24, 32)), arena.array("f4", (4, 2, 16))
        fill(tables, [5, 0, 3, 1, 77, -1])
        fill(lengths, [9, 10, 11, 99])
        fill(q, [((i * 29) % 53 - 26) / 26 for i in range(4 * 2 * 32)])
        cache.bytes[:] = struct.pack("<768e", *[((i * 31) % 61 - 30) / 32 for i in range(768)])
        geometry = client.mla(2, 32, 16, 11, 24, "f2", page_rows=4, table_queries=3)
        c = channel.mla(geometry, q, cache, tables, o, 0.5, lengths=lengths)
        out["pages"] = {"q": floats(q), "o": floats(o), "detail": c.detail,
                        "cache": list(struct.unpack("<768e", cache.bytes))}
        out["pages that are not whole"] = refused(lambda: client.mla(2, 32, 16, 11, 22, "f2", page_rows=4))
        out["alive"] = client.alive
    out["closed"] = refused(lambda: client.model("layers"))
    print(json.dumps(out))


main()
