# SPDX-License-Identifier: Apache-2.0
"""exl3.py - libexl3 for Python: standard library only, NumPy arrays where NumPy is there.

    import exl3
    with exl3.Client() as client:
        model = client.model("tiny-llama")
        qkv = model.module("model.layers.0.self_attn.qkv_proj")
        arena, channel = client.arena(1 << 20), client.channel()
        x, y = arena.array("f2", (1, qkv.k)), arena.array("f4", (1, qkv.n))
        x[:] = ...
        channel.linear(qkv, x, y)      # y holds the result

With CUDA, client.device_arena() gives memory of the GPU and client.register(tensor) lets the daemon use a tensor's
own; its operands are PyTorch tensors (or anything with data_ptr(), dtype, shape and is_contiguous()):

    x = torch.randn(1, qkv.k, dtype=torch.float16, device="cuda")
    y = torch.empty(1, qkv.n, dtype=torch.float16, device="cuda")
    memory = client.register(x), client.register(y)
    channel.linear(qkv, x, y, stream=torch.cuda.current_stream().cuda_stream)  # in the stream's order, waits for nothing

Connect before CUDA is started, or with what `exl3ctl env` prints: see Client.mps().

Arrays lie in memory that the daemon reads and writes in place. An object stays alive as long as its
client; threads: as in exl3.h, a channel is one thread's at a time. Every failure raises exl3.Error, an
OSError whose errno says what kind it is. The library is libexl3.so.0, or what $EXL3_LIBRARY names.
"""
import ctypes as C
import os

try:
    import numpy
except ImportError:  # arrays are memoryviews of bytes then
    numpy = None

F16, BF16, F32, E4M3, I32, I64, E4M3_656 = 1, 2, 3, 4, 5, 6, 7
ANY, LINEAR, MOE, MLP = 0, 1, 2, 3
STORED, DETERMINISTIC = 1, 2
FOREVER = 2**64 - 1
HOST = 2**64 - 1  # in the place of a stream: Channel.ready() says when a call may start
_TORCH = {"torch.float16": F16, "torch.bfloat16": BF16, "torch.float32": F32, "torch.float8_e4m3fn": E4M3,
          "torch.int32": I32, "torch.int64": I64}

# name: (code, bytes, NumPy's type; bf16 is kept in 16-bit integers)
TYPES = {"f2": (F16, 2, "<f2"), "bf16": (BF16, 2, "<u2"), "f4": (F32, 4, "<f4"), "e4m3": (E4M3, 1, "|u1"), "e4m3_656": (E4M3_656, 656, "|V656"),
         "i4": (I32, 4, "<i4"), "i8": (I64, 8, "<i8")}


class Error(OSError):
    """errno and the sentence of exl3_last_error()."""


class _ModuleInfo(C.Structure):
    _fields_ = [(n, C.c_uint32) for n in ("kind", "k", "n", "k_logical", "n_logical", "nr_shards", "nr_experts",
                                          "intermediate", "act")] + \
               [("limit", C.c_float), ("routed_scale", C.c_float), ("bytes", C.c_uint64)]


class _ShardInfo(C.Structure):
    _fields_ = [(n, C.c_uint32) for n in ("k", "n", "k_logical", "n_logical", "rate2", "codebook")] + [("bias", C.c_bool)]


class _Tensor(C.Structure):
    _fields_ = [("data", C.c_void_p), ("bytes", C.c_uint64), ("dtype", C.c_char * 8), ("nr_dims", C.c_uint32),
                ("shape", C.c_uint64 * 8), ("fd", C.c_int), ("offset", C.c_uint64), ("map", C.c_void_p),
                ("map_bytes", C.c_uint64)]


class _Sqe(C.Structure):
    _fields_ = [("op", C.c_uint8), ("x_dtype", C.c_uint8), ("y_dtype", C.c_uint8), ("reserved0", C.c_uint8),
                ("flags", C.c_uint32), ("user_data", C.c_uint64), ("module", C.c_uint32), ("rows", C.c_uint32),
                ("x", C.c_uint64), ("y", C.c_uint64), ("x_stride", C.c_uint32), ("y_stride", C.c_uint32),
                ("deadline_ns", C.c_uint64), ("kernel", C.c_uint32), ("stream_seq", C.c_uint32),
                ("words", C.c_uint64 * 8)]


class Completion(C.Structure):
    """Of one request: result is 0 or a negative errno, detail counts skipped ids (or says why it failed)."""
    _fields_ = [("user_data", C.c_uint64), ("result", C.c_int32), ("flags", C.c_uint32), ("detail", C.c_uint64),
                ("exec_ns", C.c_uint64)]


class _MlaShape(C.Structure):
    _fields_ = [("heads", C.c_uint32), ("dim", C.c_uint32), ("value_dim", C.c_uint32), ("topk", C.c_uint32),
                ("slots", C.c_uint64), ("cache_stride", C.c_uint64), ("indices_stride", C.c_uint32),
                ("cache_dtype", C.c_uint32), ("indices_dtype", C.c_uint32), ("page_rows", C.c_uint32),
                ("table_queries", C.c_uint32), ("device", C.c_char_p)]


assert C.sizeof(_Sqe) == 128 and C.sizeof(Completion) == 32


def _declare(lib):
    p, u, u32, u64, ref = C.c_void_p, C.c_uint, C.c_uint32, C.c_uint64, C.c_uint64
    out = C.POINTER(C.c_void_p)
    rows = [p, ref, u, ref, u, u32]
    calls = {
        "last_error": (C.c_char_p, []),
        "connect_flags": (C.c_int, [C.c_char_p, C.c_char_p, u, out]),
        "close": (p, [p]),
        "alive": (C.c_bool, [p]),
        "last_code": (C.c_int, []),
        "reconnect": (C.c_int, [p, u64]),
        "mps": (C.c_int, [p]),
        "model_open": (C.c_int, [p, C.c_char_p, out]),
        "model_fingerprint": (C.c_char_p, [p]),
        "model_device": (C.c_char_p, [p]),
        "module_open": (C.c_int, [p, C.c_char_p, u, out]),
        "module_get_info": (None, [p, C.POINTER(_ModuleInfo)]),
        "module_get_shard": (C.c_int, [p, u32, C.POINTER(_ShardInfo)]),
        "tensor_open": (C.c_int, [p, C.c_char_p, C.POINTER(_Tensor)]),
        "tensor_close": (None, [C.POINTER(_Tensor)]),
        "arena_new": (C.c_int, [p, C.c_size_t, out]),
        "arena_new_device": (C.c_int, [p, C.c_size_t, out]),
        "arena_free": (p, [p]),
        "memory_register": (C.c_int, [p, p, C.c_size_t, out]),
        "stream_call": (C.c_int, [p, p, C.POINTER(u32)]),
        "stream_ready": (None, [p, u32]),
        "stream_result": (C.c_int, [p, u32, C.POINTER(Completion), u64]),
        "stream_error": (C.c_int, [p, C.POINTER(u32)]),
        "arena_ptr": (p, [p]),
        "arena_bytes": (C.c_size_t, [p]),
        "arena_alloc": (p, [p, C.c_size_t]),
        "arena_ref": (ref, [p, p]),
        "channel_new_flags": (C.c_int, [p, u32, u, out]),
        "channel_mode": (C.c_int, [p, C.POINTER(C.c_char_p)]),
        "memory_ref": (ref, [p]),
        "channel_set_spin": (None, [p, u64]),
        "sq_get": (C.POINTER(_Sqe), [p]),
        "submit": (C.c_int, [p]),
        "wait": (C.c_int, [p, C.POINTER(Completion), u64]),
        "fd": (C.c_int, [p]),
        "fd_clear": (None, [p]),
        "result_text": (C.c_char_p, [C.POINTER(Completion)]),
        "prep_linear": (None, [C.POINTER(_Sqe)] + rows),
        "prep_mlp": (None, [C.POINTER(_Sqe)] + rows),
        "prep_moe": (None, [C.POINTER(_Sqe)] + rows + [ref, u, ref, u, u32]),
        "prep_nop": (None, [C.POINTER(_Sqe)]),
        "prep_cancel": (None, [C.POINTER(_Sqe), u64]),
        "plan_begin": (C.c_int, [p]),
        "plan_end": (C.c_int, [p, out]),
        "plan_free": (p, [p]),
        "plan_calls": (u32, [p]),
        "prep_plan": (None, [C.POINTER(_Sqe), p]),
        "mla_register": (C.c_int, [p, C.POINTER(_MlaShape), C.POINTER(u32)]),
        "prep_mla": (None, [C.POINTER(_Sqe), u32, ref, u, ref, ref, ref, u, ref, u32, C.c_float, C.c_float]),
        "prep_mla_lengths": (None, [C.POINTER(_Sqe), ref]),
    }
    for name, (result, args) in calls.items():
        f = getattr(lib, "exl3_" + name)
        f.restype, f.argtypes = result, args
    return lib


_lib = _declare(C.CDLL(os.environ.get("EXL3_LIBRARY", "libexl3.so.0"), use_errno=True))


def _check(code):
    if code < 0:
        raise Error(-code, _lib.exl3_last_error().decode(errors="replace"))
    return code


def _open(call, *args):
    handle = C.c_void_p()
    _check(call(*args, C.byref(handle)))
    return handle


class Client:
    """A connection. Closing it ends everything that was opened from it."""

    def __init__(self, path=None, name=None, mode=None):
        """mode: who runs the requests of its channels: "direct", the daemon; "mapped", this process, with the daemon's
        weights (see enum exl3_mode in exl3.h); None: what $EXL3_MODE and the daemon's policy say."""
        self._p = None
        self._memory = []  # GPU memory that operands may lie in
        self._p = _open(_lib.exl3_connect_flags, os.fsencode(path) if path else None, name.encode() if name else None,
                        {None: 0, "mapped": 1 << 2, "direct": 1 << 3}[mode])

    def close(self):
        self._p = _lib.exl3_close(self._p)

    def __enter__(self):
        return self

    def __exit__(self, *exc):
        self.close()

    @property
    def alive(self):
        """False from the end of the daemon's worker until all that is open is there again."""
        return _lib.exl3_alive(self._p)

    def reconnect(self, timeout_ns=FOREVER):
        """Waits until all that is open is there again. Error: ETIMEDOUT, or ESTALE if a model's content has changed."""
        _check(_lib.exl3_reconnect(self._live(), timeout_ns))

    def mps(self):
        """Does CUDA in this process share the daemon's MPS server (or will it, when it is started)? False: there is
        none. Error: ESTALE or ENOTCONN, it is elsewhere. Connect before CUDA is started, which sets the environment."""
        return bool(_check(_lib.exl3_mps(self._live())))

    def _live(self):
        if not self._p:
            raise Error(9, "the client is closed")
        return self._p

    def model(self, name):
        return Model(self, name)

    def arena(self, size):
        return Arena(self, size)

    def device_arena(self, size):
        """Memory of the GPU that the daemon makes, zeroed; CUDA must be started in this thread."""
        return DeviceArena(self, size)

    def register(self, tensor, size=None):
        """Lets the daemon use a CUDA tensor's memory (or @size bytes at a device address). Requests may then have
        operands anywhere in it, until free() of what this returns; the memory must stay until then."""
        if size is None:
            tensor, size = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        return Memory(self, _open(_lib.exl3_memory_register, self._live(), tensor, size))

    def operand(self, x, mapped=False):
        """What a request calls it: an Array is one; a tensor must lie in GPU memory that the daemon knows. On a mapped
        channel it may lie anywhere, and a NumPy array is an operand too (f2, f4, i4, i8)."""
        if hasattr(x, "ref"):
            return x
        if mapped and hasattr(x, "__array_interface__"):
            code = {"<f2": F16, "<f4": F32, "<i4": I32, "<i8": I64}.get(x.__array_interface__["typestr"])
            if code is None or not x.flags["C_CONTIGUOUS"]:
                raise ValueError(f"no operand can have the type {x.dtype}, or it is not contiguous")
            return Operand(_lib.exl3_memory_ref(x.__array_interface__["data"][0]), code, tuple(x.shape))
        code = _TORCH.get(str(x.dtype))
        if code is None:
            raise ValueError(f"no operand can have the type {x.dtype}")
        if not x.is_contiguous():
            raise ValueError("operands must be contiguous")
        for memory in self._memory:
            ref = _lib.exl3_arena_ref(memory._p, x.data_ptr())
            if ref:
                return Operand(ref, code, tuple(x.shape))
        if mapped:
            return Operand(_lib.exl3_memory_ref(x.data_ptr()), code, tuple(x.shape))
        raise Error(14, "the tensor lies in no memory that the daemon knows: Client.register() it")

    def channel(self, entries=16, mode=None):
        """mode: "mapped" or "direct"; None: as the client."""
        return Channel(self, entries, mode)

    def mla(self, heads, dim, value_dim, topk, slots, cache="bf16", indices="i4", page_rows=1, table_queries=1,
            device=None):
        """A geometry for Channel.mla(). With page_rows > 1 indices are block tables [tables, ceil(topk / page_rows)];
        table_queries queries in a row share one. cache "e4m3_656": records, dim 576 and value_dim 512. device: where it
        runs, as Model.device."""
        shape = _MlaShape(heads, dim, value_dim, topk, slots, 0, 0, TYPES[cache][0], TYPES[indices][0], page_rows,
                          table_queries, device.encode() if device else None)
        handle = C.c_uint32()
        _check(_lib.exl3_mla_register(self._live(), C.byref(shape), C.byref(handle)))
        return handle.value


class Model:
    def __init__(self, client, name):
        self.client, self.name = client, name
        self._p = _open(_lib.exl3_model_open, client._live(), name.encode())
        self.fingerprint = _lib.exl3_model_fingerprint(self._p).decode()
        self.device = _lib.exl3_model_device(self._p).decode()

    def module(self, name, kind=ANY):
        """A matrix, a fused group, a routed block or an MLP; see exl3_module_open() in exl3.h."""
        return Module(self, name, kind)

    def tensor(self, name):
        """(dtype, shape, read-only bytes) of an unquantized tensor; the memory is the daemon's, not copied."""
        self.client._live()
        return Tensor(self, name)


class Module:
    """k and n are the logical sizes, stored_k and stored_n those of the padded matrix."""

    def __init__(self, model, name, kind):
        model.client._live()
        self.client, self.name = model.client, name
        self._p = _open(_lib.exl3_module_open, model._p, name.encode(), kind)
        info = _ModuleInfo()
        _lib.exl3_module_get_info(self._p, C.byref(info))
        self.kind, self.k, self.n = info.kind, info.k_logical, info.n_logical
        self.stored_k, self.stored_n, self.bytes = info.k, info.n, info.bytes
        self.experts, self.intermediate = info.nr_experts, info.intermediate
        self.shards = []
        for i in range(info.nr_shards):
            s = _ShardInfo()
            _check(_lib.exl3_module_get_shard(self._p, i, C.byref(s)))
            self.shards.append({"k": s.k_logical, "n": s.n_logical, "bits": s.rate2 / 2, "codebook": s.codebook,
                                "bias": s.bias})


class Tensor:
    def __init__(self, model, name):
        self._t = _Tensor()
        _check(_lib.exl3_tensor_open(model._p, name.encode(), C.byref(self._t)))
        self.name, self.dtype = name, self._t.dtype.decode()
        self.shape = tuple(self._t.shape[:self._t.nr_dims])
        raw = (C.c_ubyte * self._t.bytes).from_address(self._t.data) if self._t.bytes else b""
        self.data = memoryview(raw).cast("B").toreadonly()  # valid until close()

    def close(self):
        self.data = None
        _lib.exl3_tensor_close(C.byref(self._t))


def _place(arena, dtype, shape):
    """(code, NumPy's type, bytes, address, reference) of a new array in an arena. Error: it is full."""
    code, size, kind = TYPES[dtype]
    for d in shape:
        size *= d
    at = _lib.exl3_arena_alloc(arena._p, size)
    if not at:
        raise Error(12, f"the arena of {arena.size} bytes is full")
    return code, kind, size, at, _lib.exl3_arena_ref(arena._p, at)


class Array:
    """Part of an arena: what a request reads or writes. Indexing goes to the NumPy array (or memoryview)."""

    def __init__(self, arena, dtype, shape):
        self.arena, self.dtype, self.shape = arena, dtype, tuple(shape)
        self.code, kind, size, at, self.ref = _place(arena, dtype, self.shape)
        self.bytes = memoryview((C.c_ubyte * size).from_address(at)).cast("B")
        self.data = numpy.frombuffer(self.bytes, kind).reshape(self.shape) if numpy else self.bytes

    def __getitem__(self, i):
        return self.data[i]

    def __setitem__(self, i, value):
        self.data[i] = value


class Arena:
    """Memory that the daemon reads and writes in place. Its arrays must not be used after Client.close()."""

    def __init__(self, client, size):
        self.client = client
        self._p = _open(_lib.exl3_arena_new, client._live(), size)
        self.size = _lib.exl3_arena_bytes(self._p)

    def array(self, dtype, shape):
        """@dtype: f2, bf16, f4, e4m3, i4 or i8. Never freed singly."""
        self.client._live()
        return Array(self, dtype, shape)

    def free(self):
        """After the last request that uses it. Its arrays must not be used afterwards."""
        if self._p and self.client._p:
            _lib.exl3_arena_free(self._p)
        self._p = None


class Operand:
    """Memory of an arena at @ref, as rows of a type (F32, ...) and shape of the caller's."""

    def __init__(self, ref, code, shape):
        self.ref, self.code, self.shape = ref, code, shape


class Memory:
    """GPU memory that the daemon knows; see Client.register()."""

    def __init__(self, client, p):
        self.client, self._p = client, p
        self.size = _lib.exl3_arena_bytes(p)
        client._memory.append(self)

    def free(self):
        """After the last request that uses it."""
        if self._p and self.client._p:
            self.client._memory.remove(self)
            _lib.exl3_arena_free(self._p)
        self._p = None


class DeviceArray:
    """Part of a DeviceArena. torch.as_tensor(array, device="cuda") is a tensor of the same memory; bf16 and e4m3
    come as integers of their size: .view() them."""

    def __init__(self, arena, dtype, shape):
        self.arena, self.dtype, self.shape = arena, dtype, tuple(shape)
        self.code, kind, _, at, self.ref = _place(arena, dtype, self.shape)
        # PyTorch knows no unsigned 16-bit integers.
        self.__cuda_array_interface__ = {"shape": self.shape, "typestr": kind.replace("<u2", "<i2"), "data": (at, False),
                                         "version": 3}


class DeviceArena(Memory):
    def __init__(self, client, size):
        super().__init__(client, _open(_lib.exl3_arena_new_device, client._live(), size))

    def array(self, dtype, shape):
        """@dtype as for Arena.array()."""
        self.client._live()
        return DeviceArray(self, dtype, shape)


class Channel:
    """Requests run in order. linear(), mlp(), moe() and mla() wait; with wait=False they return the number that
    the Completion of wait() will carry in user_data. With stream=S, a CUDA stream's address, they run in the order
    of that stream and return the number of the call at once; synchronise the stream, then ask stream_error()."""

    def __init__(self, client, entries, mode=None):
        self.client = client
        self._p = _open(_lib.exl3_channel_new_flags, client._live(), entries, _mode(mode))
        why = C.c_char_p()
        self.mode = ("direct", "mapped")[_lib.exl3_channel_mode(self._p, C.byref(why))]
        self.mode_reason = why.value.decode(errors="replace")  # why it is direct although mapped was preferred, or ""
        self._next = 0
        self._entries, self._call = entries, 0
        self._recording = False

    def _get(self, options=()):
        self.client._live()
        # Before an entry is taken: one that was taken goes with the next submission, whatever became of its call.
        unknown = set(options) - {"flags", "timeout_ns", "stream"}
        if unknown:
            raise TypeError(f"no such option: {', '.join(sorted(unknown))} (flags, timeout_ns, stream)")
        if self._recording and (options.get("timeout_ns") or options.get("stream") is not None):
            raise ValueError("a call of a plan has no deadline and no stream of its own")
        sqe = _lib.exl3_sq_get(self._p)
        if not sqe and "stream" in options and self._call:
            # As a launch waits for room in the driver's queue: a ring full of calls, so one of them is so old.
            self.stream_result((self._call - self._entries + 1) % 2**32)
            sqe = _lib.exl3_sq_get(self._p)
        if not sqe:
            _check(_lib.exl3_last_code())
        return sqe

    def _operand(self, x):
        return self.client.operand(x, self.mode == "mapped")

    def _send(self, sqe, wait, flags=0, timeout_ns=0, stream=None):
        if self._recording:
            sqe.contents.flags = flags
            return None
        self._next += 1
        number = self._next
        sqe.contents.user_data = number
        sqe.contents.flags = flags
        if timeout_ns:
            sqe.contents.deadline_ns = _now() + timeout_ns
        if stream is not None:
            call = C.c_uint32()
            _check(_lib.exl3_stream_call(self._p, stream, C.byref(call)))
            self._call = call.value
            return call.value
        _check(_lib.exl3_submit(self._p))
        if not wait:
            return number
        while True:
            c = self.wait()
            if c.user_data == number:
                break
        if c.result < 0:
            raise Error(-c.result, _lib.exl3_result_text(C.byref(c)).decode())
        return c

    def record(self):
        """A Plan of the calls that are made while it is a context:

            with channel.record() as plan:
                channel.linear(qkv, x, y)
                channel.linear(down, h, z)
            plan.run()     # both, on what the arrays hold by then; one entry, one completion
        """
        return Plan(self)

    def wait(self, timeout_ns=FOREVER):
        """The next Completion; None: time is up, or nothing is outstanding."""
        self.client._live()
        c = Completion()
        return c if _check(_lib.exl3_wait(self._p, C.byref(c), timeout_ns)) else None

    def ready(self, call):
        """Of a call with stream=HOST: it may start."""
        _lib.exl3_stream_ready(self._p, call)

    def stream_result(self, call, timeout_ns=FOREVER):
        """The Completion of a call; None: it has not ended within the time."""
        self.client._live()
        c = Completion()
        code = _lib.exl3_stream_result(self._p, call, C.byref(c), timeout_ns)
        return c if code == 0 else None if code == -11 else _check(code)

    def stream_error(self):
        """(errno, call) of the first call that has failed since this was asked; None: none has."""
        self.client._live()
        call = C.c_uint32()
        code = _lib.exl3_stream_error(self._p, C.byref(call))
        return (-code, call.value) if code else None

    def fileno(self):
        """For poll(): readable when completions may be there; then clear() and wait(0) until it returns None."""
        return _lib.exl3_fd(self._p)

    def clear(self):
        _lib.exl3_fd_clear(self._p)

    def nop(self, wait=True, **options):
        sqe = self._get(options)
        _lib.exl3_prep_nop(sqe)
        return self._send(sqe, wait, **options)

    def cancel(self, number, wait=True):
        sqe = self._get()
        _lib.exl3_prep_cancel(sqe, number)
        return self._send(sqe, wait)

    def linear(self, module, x, y, wait=True, **options):
        """y = x W; x [m, k] and y [m, n] are Arrays or tensors. Options: flags, timeout_ns, stream."""
        x, y = map(self._operand, (x, y))
        m = _rows(module, x, y, options)
        sqe = self._get(options)
        _lib.exl3_prep_linear(sqe, module._p, x.ref, x.code, y.ref, y.code, m)
        return self._send(sqe, wait, **options)

    def mlp(self, module, x, y, wait=True, **options):
        x, y = map(self._operand, (x, y))
        m = _rows(module, x, y, options)
        sqe = self._get(options)
        _lib.exl3_prep_mlp(sqe, module._p, x.ref, x.code, y.ref, y.code, m)
        return self._send(sqe, wait, **options)

    def moe(self, module, x, y, ids, weights, wait=True, **options):
        """ids and weights [m, topk]; the completion's detail counts invalid ids."""
        x, y, ids, weights = map(self._operand, (x, y, ids, weights))
        m = _rows(module, x, y, options)
        if ids.shape != weights.shape or len(ids.shape) != 2 or ids.shape[0] != m:
            raise ValueError(f"ids {ids.shape} and weights {weights.shape} for {m} rows")
        sqe = self._get(options)
        _lib.exl3_prep_moe(sqe, module._p, x.ref, x.code, y.ref, y.code, m, ids.ref, ids.code, weights.ref,
                           weights.code, ids.shape[1])
        return self._send(sqe, wait, **options)

    def mla(self, geometry, q, cache, indices, o, scale, lse=None, kv_scale=1.0, lengths=None, wait=True, **options):
        """q [batch, heads, dim]; lengths [batch] i4, keys that each query sees; see exl3_prep_mla() in exl3.h. The
        daemon checks sizes against the geometry."""
        q, cache, indices, o = map(self._operand, (q, cache, indices, o))
        lse, lengths = (self._operand(a) if a is not None else None for a in (lse, lengths))
        sqe = self._get(options)
        _lib.exl3_prep_mla(sqe, geometry, q.ref, q.code, cache.ref, indices.ref, o.ref, o.code, lse.ref if lse else 0,
                           q.shape[0], scale, kv_scale)
        if lengths:
            _lib.exl3_prep_mla_lengths(sqe, lengths.ref)
        return self._send(sqe, wait, **options)


class Plan:
    """Recorded calls of a channel; see Channel.record() and, for what a plan keeps and when it fails, exl3.h."""

    def __init__(self, channel):
        self.channel, self._p = channel, None

    def __enter__(self):
        self.channel.client._live()
        _check(_lib.exl3_plan_begin(self.channel._p))
        self.channel._recording = True
        return self

    def __exit__(self, kind, *_):
        self.channel._recording = False
        plan = C.c_void_p()
        if kind:
            _lib.exl3_plan_end(self.channel._p, None)
        else:
            _check(_lib.exl3_plan_end(self.channel._p, C.byref(plan)))
            self._p = plan

    def __len__(self):
        return _lib.exl3_plan_calls(self._p) if self._p else 0

    def run(self, wait=True, **options):
        """Replays it. Options: timeout_ns, stream."""
        if not self._p:
            raise ValueError("the plan is not recorded, or was freed")
        sqe = self.channel._get(options)
        _lib.exl3_prep_plan(sqe, self._p)
        return self.channel._send(sqe, wait, **options)

    def free(self):
        """After its last replay; else it lives as long as its client."""
        if self._p:
            self.channel.client._live()
            _lib.exl3_plan_free(self._p)
            self._p = None


def _mode(mode):
    flags = {None: 0, "auto": 0, "mapped": 1, "direct": 2}
    if mode not in flags:
        raise ValueError(f"mode {mode!r} is none of auto, mapped, direct")
    return flags[mode]


def _now():
    import time
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def _rows(module, x, y, options):
    """Rows of a request, after a check of what the daemon cannot see: it knows buffers, not shapes."""
    stored = options.get("flags", 0) & STORED
    k, n = (module.stored_k, module.stored_n) if stored else (module.k, module.n)
    if len(x.shape) != 2 or len(y.shape) != 2 or x.shape[0] != y.shape[0] or x.shape[1] != k or y.shape[1] != n:
        raise ValueError(f"x {x.shape}, y {y.shape}; {module.name} takes [m, {k}] and gives [m, {n}]")
    return x.shape[0]
