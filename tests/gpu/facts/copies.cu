/* SPDX-License-Identifier: Apache-2.0 */
/* copies.cu - pinned copy rates, and host memory read over PCIe by a kernel against a copy, by size. */
#include "facts.h"

/* Reads @n words of 16 bytes once and keeps their sum alive. */
__global__ static void read_host(const uint4 *src, size_t n, uint32_t *sink)
{
	uint32_t acc = 0;

	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x) {
		const uint4 v = src[i];

		acc += v.x ^ v.y ^ v.z ^ v.w;
	}
	if (acc == 0x12345678)
		*sink = acc;
}

__global__ static void write_host(uint4 *dst, size_t n)
{
	for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
	     i += (size_t)gridDim.x * blockDim.x)
		dst[i] = make_uint4(1, 2, 3, 4);
}

/* Microseconds of one of @reps runs, host time from the first enqueue to the end. */
template <class F> static double time_us(cudaStream_t st, int reps, F fn)
{
	fn();
	RT(cudaStreamSynchronize(st));
	const double t = now_ms();

	for (int i = 0; i < reps; i++) {
		fn();
		RT(cudaStreamSynchronize(st));
	}
	return (now_ms() - t) * 1e3 / reps;
}

static int body(int sock, const void *arg)
{
	const size_t big = 256u << 20;
	void *pinned, *plain, *dev;
	uint32_t *sink;
	cudaStream_t st;

	(void)sock;
	(void)arg;
	RT(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking));
	RT(cudaHostAlloc(&pinned, big, cudaHostAllocDefault));
	plain = aligned_alloc(4096, big);
	memset(plain, 1, big);
	memset(pinned, 1, big);
	RT(cudaHostRegister(plain, big, cudaHostRegisterDefault));
	RT(cudaMalloc(&dev, big));
	RT(cudaMalloc((void **)&sink, 4));
	const auto copy = [&](void *dst, const void *src, size_t n, cudaMemcpyKind kind) {
		return time_us(st, 4, [&] { RT(cudaMemcpyAsync(dst, src, n, kind, st)); });
	};
	const double h2d = big / copy(dev, pinned, big, cudaMemcpyHostToDevice) * 1e-3;
	const double d2h = big / copy(pinned, dev, big, cudaMemcpyDeviceToHost) * 1e-3;
	const double reg = big / copy(dev, plain, big, cudaMemcpyHostToDevice) * 1e-3;

	fact("pinned_rates", "registered memory copies as fast as cudaHostAlloc's", reg > 0.9 * h2d,
	     "H2D %.1f, D2H %.1f, registered H2D %.1f GB/s", h2d, d2h, reg);
	size_t cross_in = 0, cross_out = 0;
	char table[400] = "";
	int used = 0;

	for (size_t n = 4096; n <= (16u << 20); n *= 4) {
		const unsigned blocks = (unsigned)(n / 4096 < 264 ? n / 4096 : 264);
		const double read = time_us(st, 30, [&] {
			read_host<<<blocks, 256, 0, st>>>((const uint4 *)pinned, n / 16, sink);
		});
		/* A copy is followed by the kernel that reads the copied bytes. */
		const double in = time_us(st, 30, [&] {
			RT(cudaMemcpyAsync(dev, pinned, n, cudaMemcpyHostToDevice, st));
			read_host<<<blocks, 256, 0, st>>>((const uint4 *)dev, n / 16, sink);
		});
		const double write = time_us(st, 30, [&] {
			write_host<<<blocks, 256, 0, st>>>((uint4 *)pinned, n / 16);
		});
		const double out = time_us(st, 30, [&] {
			write_host<<<blocks, 256, 0, st>>>((uint4 *)dev, n / 16);
			RT(cudaMemcpyAsync(pinned, dev, n, cudaMemcpyDeviceToHost, st));
		});

		if (read > in && !cross_in)
			cross_in = n;
		if (write > out && !cross_out)
			cross_out = n;
		used += snprintf(table + used, sizeof(table) - used, " %zuK %.0f/%.0f %.0f/%.0f",
				 n >> 10, read, in, write, out);
	}
	fact("zero_copy", "small operands are faster read in place over PCIe than copied first",
	     cross_in == 0 || cross_in > 4096, "us in place/copied, in then out:%s", table);
	fact("zero_copy_limit", "in place wins up to some size", cross_in != 4096,
	     "reads up to %zu KiB, writes up to %zu KiB (0: always)",
	     (cross_in ? cross_in / 4 : 0) >> 10, (cross_out ? cross_out / 4 : 0) >> 10);
	return facts_failed;
}

int main(void)
{
	skip_without_gpu("copies");
	struct child c = start(body, NULL, 30);
	const int status = finish(&c, 30000);

	if (status != 0 && status != 1)
		die("copies: child ended with %d", status);
	return status;
}
