/* SPDX-License-Identifier: Apache-2.0 */
/* test_weights_failures.c - content and place of what is loaded, and what failures leave behind. */
#include "tests/test.h"

#include "daemon/checkpoint.h"
#include "daemon/fault.h"
#include "daemon/weights.h"
#include "kernels/format.h"
#include "tests/unit/fake_backend.h"
#include "tests/unit/make_ckpt.h"
#include "tests/unit/weights_model.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

/* ---- content and place ---- */

/* The same tensors in another order, over other files, at other alignments: the same content. */
static void fingerprint(void **state)
{
	char first[33] = "", *dir;
	struct exl3_model *m;

	(void)state;
	for (int way = 0; way < 5; way++) {
		struct mk *f = mk_new(), *g = mk_new();

		fake_reset();
		dir = mk_dir();
		mk_matrix(way & 1 ? g : f, "a", 256, 128, 8, 2, 0);
		mk_tensor(way & 2 ? g : f, "w", "F16", MK_DIMS(2, 3), NULL, 12);
		mk_matrix(way == 3 ? f : g, way == 4 ? "c" : "b", 128, 128, 6, 1, MK_BIAS);
		mk_tensor(f, "e", "F16", MK_DIMS(0), NULL, 0);
		mk_save(f, dir, way & 1 ? "y.safetensors" : "x.safetensors", (unsigned)way);
		mk_save(g, dir, way & 1 ? "x.safetensors" : "y.safetensors", 7);
		m = load(dir);
		if (way == 0)
			strcpy(first, m->fingerprint);
		if (way < 4)
			assert_string_equal(m->fingerprint, first);
		else
			assert_string_not_equal(m->fingerprint, first);
		exl3_model_put(m);
		mk_rmdir(dir);
	}
	/* Any byte, a dtype or a shape changes it. */
	for (int way = 0; way < 4; way++) {
		static const uint16_t data[6] = {1, 2, 3, 4, 5, 6}, other[6] = {1, 2, 3, 4, 5, 7};
		struct mk *f = mk_new();

		fake_reset();
		dir = mk_dir();
		mk_matrix(f, "a", 128, 128, 8, 2, 0);
		mk_tensor(f, "w", way == 1 ? "BF16" : "F16",
			  way == 2 ? MK_DIMS(3, 2) : MK_DIMS(2, 3), way == 3 ? other : data, 12);
		mk_save(f, dir, "x.safetensors", 0);
		m = load(dir);
		if (way == 0)
			strcpy(first, m->fingerprint);
		else
			assert_string_not_equal(m->fingerprint, first);
		exl3_model_put(m);
		mk_rmdir(dir);
	}
	fake_reset();
}

/* Larger than all buffers together, so that every one is used again; copies happen late. */
static void large_and_late(void **state)
{
	char *dir = mk_dir();
	struct mk *f = mk_new();
	struct exl3_model *m;

	(void)state;
	fake_reset();
	fake.late = true;
	for (int i = 0; i < 5; i++) {
		char name[32];

		snprintf(name, sizeof(name), "m%d", i);
		mk_matrix(f, name, 4096, 4096 + 128, 8, 2, 0);
		snprintf(name, sizeof(name), "w%d", i);
		mk_tensor(f, name, "U8", MK_DIMS(3000001), NULL, 3000001);
	}
	mk_save(f, dir, "x.safetensors", 1);
	m = load(dir);
	content(m, dir);
	assert_true(fake.syncs >= 4);
	exl3_model_put(m);
	mk_rmdir(dir);
	fake_reset();
}

/* ---- failures ---- */

static void memory(void **state)
{
	(void)state;
	fake_reset();
	fake.memory_free = 1000;
	refused("tests/models/tiny-llama", -ENOMEM, "bytes for weights, the device has 1000 of");
	assert_int_equal(fake.writes, 0);
	fake_reset();
	fake.fail_slab = true;
	refused("tests/models/tiny-llama", -ENOMEM, "0 free");
	assert_int_equal(fake.writes, 0);
	fake_reset();
}

static void system_failures(void **state)
{
	static const struct {
		const char *fault;
		int want;
		const char *say;
	} rows[] = {
		{"weights.slab:1", -ENOMEM, "no memory for weights"},
		{"weights.tensors:1", -ENOMEM, "memfd_create for unquantized tensors"},
		{"loader.read:2", -EIO, "model.safetensors: read at byte"},
	};

	(void)state;
	for (size_t i = 0; i < TEST_NR(rows); i++) {
		fake_reset();
		assert_int_equal(setenv("EXL3_FAULT", rows[i].fault, 1), 0);
		exl3_fault_init();
		refused("tests/models/tiny-llama", rows[i].want, rows[i].say);
	}
	assert_int_equal(unsetenv("EXL3_FAULT"), 0);
	exl3_fault_init();
	fake_reset();
}

static void backend_failures(void **state)
{
	(void)state;
	for (unsigned n = 1; n <= 10; n++) {
		struct exl3_model *m = NULL;
		int rc;

		fake_reset();
		fake.late = true;
		fake.fail_staging = n;
		m = new_model("tests/models/tiny-llama");
		rc = exl3_model_load(m);
		assert_int_equal(rc, fake.stagings >= n ? -ENOMEM : 0);
		exl3_model_put(m);
		fake_reset();
		fake.late = true;
		fake.fail_write = n * n;
		refused("tests/models/tiny-llama", -EIO, "slab_write: as the test wants it");
		fake_reset();
	}
	fake.late = true;
	fake.fail_sync = 1;
	refused("tests/models/tiny-llama", -EIO, "slab_sync: as the test wants it");
	fake_reset();
}

static void cancel(void **state)
{
	struct exl3_model *m;

	(void)state;
	fake_reset();
	m = new_model("tests/models/tiny-llama");
	atomic_store(&m->cancel, true);
	test_code(exl3_model_load(m), -ECANCELED, &m->error);
	assert_int_equal(m->state, EXL3_MODEL_FAILED);
	exl3_model_put(m);
	fake_reset();
}

/* Every prefix length of a small checkpoint is refused, and nothing is left behind. */
static void truncated(void **state)
{
	char *dir = mk_dir(), path[5000];
	struct mk *f = mk_new();
	struct stat st;

	(void)state;
	fake_reset();
	mk_matrix(f, "a", 128, 128, 2, 2, 0);
	mk_save(f, dir, "x.safetensors", 0);
	snprintf(path, sizeof(path), "%s/x.safetensors", dir);
	assert_int_equal(stat(path, &st), 0);
	for (off_t n = st.st_size - 1; n >= 0; n -= n > 600 ? 97 : 1) {
		assert_int_equal(truncate(path, n), 0);
		refused(dir, -EINVAL, "x.safetensors");
	}
	mk_rmdir(dir);
	fake_reset();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(fingerprint),     test_case(large_and_late),   test_case(memory),
		test_case(system_failures), test_case(backend_failures), test_case(cancel),
		test_case(truncated),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
