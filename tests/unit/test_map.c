/* SPDX-License-Identifier: Apache-2.0 */
/* test_map.c - the table of a mapped model: what is written comes back as it was, and nothing broken is taken. */
#include "tests/test.h"

#include "daemon/map_write.h"
#include "kernels/map.h"
#include "tests/unit/weights_model.h"

#include <fcntl.h>
#include <math.h>
#include <stddef.h>
#include <unistd.h>

#define SEALS (F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL)

static int write_table(const struct exl3_model *m)
{
	struct exl3_error err;
	int fd = -1;

	test_code(exl3_map_write(m, "fake:0", EXL3_MAP_DETERMINISTIC, &fd, &err), 0, &err);
	return fd;
}

static void same_matrix(const struct exl3_matrix *a, const struct exl3_matrix *b)
{
	if (!a || !b) {
		assert_ptr_equal(a, b);
		return;
	}
	assert_int_equal(a->k, b->k);
	assert_int_equal(a->n, b->n);
	assert_int_equal(a->k_log, b->k_log);
	assert_int_equal(a->n_log, b->n_log);
	assert_int_equal(a->rate2, b->rate2);
	assert_int_equal(a->codebook, b->codebook);
	assert_ptr_equal(a->trellis, b->trellis);
	assert_ptr_equal(a->suh, b->suh);
	assert_ptr_equal(a->svh, b->svh);
	assert_ptr_equal(a->bias, b->bias);
}

static void same_module(const struct exl3_module_desc *a, const struct exl3_module_desc *b)
{
	assert_string_equal(a->name, b->name);
	assert_int_equal(a->kind, b->kind);
	assert_int_equal(a->k, b->k);
	assert_int_equal(a->n, b->n);
	assert_int_equal(a->k_log, b->k_log);
	assert_int_equal(a->n_log, b->n_log);
	assert_int_equal(a->act, b->act);
	assert_true(a->limit == b->limit && a->routed_scale == b->routed_scale);
	assert_int_equal(a->intermediate, b->intermediate);
	assert_int_equal(!a->plan, !b->plan);
	assert_int_equal(a->nr_shards, b->nr_shards);
	for (uint32_t i = 0; i < a->nr_shards; i++)
		same_matrix(a->shards[i], b->shards[i]);
	assert_int_equal(a->nr_experts, b->nr_experts);
	for (uint32_t i = 0; i < a->nr_experts; i++) {
		same_matrix(a->experts[i].gate, b->experts[i].gate);
		same_matrix(a->experts[i].up, b->experts[i].up);
		same_matrix(a->experts[i].down, b->experts[i].down);
	}
}

/* Everything that the daemon can be asked for, and at the same addresses if the slab is at the same one. */
static void what_is_written_comes_back(void **state)
{
	static const char *const dirs[] = {"tests/models/tiny-llama", "tests/models/tiny-deepseek",
					   "tests/models/layers"};

	(void)state;
	for (size_t i = 0; i < TEST_NR(dirs); i++) {
		struct exl3_map_modules modules;
		struct exl3_error err;
		struct exl3_map map;
		struct exl3_model *m;
		int fd;

		fake_reset();
		m = load(dirs[i]);
		fd = write_table(m);
		test_code(exl3_map_read(fd, &map, &err), 0, &err);
		close(fd);
		assert_string_equal(map.head->model, "m");
		assert_string_equal(map.head->device, "fake:0");
		assert_string_equal(map.head->fingerprint, m->fingerprint);
		assert_string_equal(map.head->backend, m->ops->name);
		assert_int_equal(map.head->flags, EXL3_MAP_DETERMINISTIC);
		assert_int_equal(map.head->slab_bytes, m->slab->bytes);
		test_code(exl3_map_build(&map, m->slab, m->ops, m->dev, &modules, &err), 0, &err);
		assert_int_equal(modules.nr, m->nr_modules);
		for (uint32_t k = 0; k < modules.nr; k++) {
			same_module(&modules.list[k], &m->modules[k]);
			assert_ptr_equal(exl3_map_find(&modules, m->modules[k].name, m->modules[k].kind),
					 &modules.list[k]);
		}
		assert_null(exl3_map_find(&modules, "nobody", EXL3_MOD_LINEAR));
		assert_null(exl3_map_find(&modules, m->modules[0].name, EXL3_MOD_ANY));
		exl3_map_modules_fini(&modules);
		exl3_map_fini(&map);
		exl3_model_put(m);
	}
}

/* A copy of a table in memory, to be spoiled. */
struct copy {
	char *p;
	size_t bytes;
	struct exl3_map_head *head;
	struct exl3_map_matrix *matrices;
	struct exl3_map_module *modules;
	uint32_t *shards;
	struct exl3_map_expert *experts;
	char *names;
};

static struct copy copy_of(int fd)
{
	struct copy c = {.bytes = (size_t)lseek(fd, 0, SEEK_END)};
	struct exl3_map_layout l;

	c.p = malloc(c.bytes + 64);
	assert_int_equal(pread(fd, c.p, c.bytes, 0), c.bytes);
	c.head = (void *)c.p;
	exl3_map_layout(c.head, &l);
	c.matrices = (void *)(c.p + l.matrices);
	c.modules = (void *)(c.p + l.modules);
	c.shards = (void *)(c.p + l.shards);
	c.experts = (void *)(c.p + l.experts);
	c.names = c.p + l.names;
	return c;
}

static int sealed(const void *p, size_t bytes, int seals)
{
	int fd = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);

	assert_true(fd >= 0);
	assert_int_equal(write(fd, p, bytes), bytes);
	assert_int_equal(fcntl(fd, F_ADD_SEALS, seals), 0);
	return fd;
}

static void refused_as(int fd, int want, const char *say)
{
	struct exl3_map map = {0};
	struct exl3_error err = {0};
	int rc = exl3_map_read(fd, &map, &err);

	if (rc != want || !strstr(err.text, say))
		fail_msg("returned %d, '%s'; wanted %d, '%s'", rc, err.text, want, say);
	assert_null(map.head);
	close(fd);
}

/* First module of a kind; -1: there is none. */
static int first_of(const struct copy *c, unsigned kind)
{
	for (uint32_t i = 0; i < c->head->nr_modules; i++)
		if (c->modules[i].kind == kind)
			return (int)i;
	return -1;
}

#define SPOIL(text, code, sentence, statement)                                                         \
	do {                                                                                           \
		struct copy c = copy_of(good);                                                         \
		struct exl3_map_module *linear = &c.modules[first_of(&c, EXL3_MOD_LINEAR)];             \
		struct exl3_map_module *moe = &c.modules[first_of(&c, EXL3_MOD_MOE)];                   \
		struct exl3_map_expert *expert = &c.experts[moe->first];                               \
		(void)linear, (void)moe, (void)expert;                                                 \
		statement;                                                                             \
		print_message("%s\n", text);                                                           \
		refused_as(sealed(c.p, c.bytes, SEALS), code, sentence);                               \
		free(c.p);                                                                             \
	} while (0)

static void what_is_broken_is_refused(void **state)
{
	struct exl3_model *m;
	struct copy whole;
	int good;

	(void)state;
	fake_reset();
	m = load("tests/models/tiny-deepseek");
	good = write_table(m);
	whole = copy_of(good);
	refused_as(sealed(whole.p, whole.bytes, F_SEAL_SHRINK | F_SEAL_GROW), -EINVAL, "not sealed");
	refused_as(sealed(whole.p, whole.bytes, F_SEAL_WRITE | F_SEAL_GROW), -EINVAL, "not sealed");
	refused_as(open("/dev/null", O_RDONLY | O_CLOEXEC), -EINVAL, "not sealed");
	refused_as(sealed(whole.p, whole.bytes - 1, SEALS), -EINVAL, "contradict");
	refused_as(sealed(whole.p, whole.bytes + 8, SEALS), -EINVAL, "contradict");
	refused_as(sealed(whole.p, sizeof(*whole.head) - 1, SEALS), -EINVAL, "has 7");
	refused_as(sealed(whole.p, 0, SEALS), -EINVAL, "has 0 bytes");
	free(whole.p);
	SPOIL("magic", -EINVAL, "no table", c.head->magic[0]++);
	SPOIL("version", -EOPNOTSUPP, "version 2", c.head->version++);
	SPOIL("flags", -EINVAL, "flags", c.head->flags |= 2);
	SPOIL("size", -EINVAL, "contradict", c.head->bytes++);
	SPOIL("no slab", -EINVAL, "slab's size", c.head->slab_bytes = 0);
	SPOIL("huge slab", -EINVAL, "slab's size", c.head->slab_bytes = 1ull << 48);
	SPOIL("smaller slab", -EINVAL, "outside of the slab", c.head->slab_bytes -= 4096);
	SPOIL("more matrices", -EINVAL, "contradict", c.head->nr_matrices++);
	SPOIL("very many matrices", -EINVAL, "contradict", c.head->nr_matrices = UINT32_MAX);
	SPOIL("very many of all", -EINVAL, "contradict",
	      c.head->nr_matrices = c.head->nr_modules = c.head->nr_shards = c.head->nr_experts = UINT32_MAX);
	SPOIL("names of all memory", -EINVAL, "contradict", c.head->names_bytes = UINT64_MAX);
	SPOIL("text without an end", -EINVAL, "has no end", memset(c.head->fingerprint, 'x', 40));
	SPOIL("name of the model", -EINVAL, "has no end", memset(c.head->model, 'x', sizeof(c.head->model)));
	SPOIL("k of 64", -EINVAL, "sizes of matrix 0", c.matrices[0].k = 64);
	SPOIL("n of 0", -EINVAL, "sizes of matrix 0", c.matrices[0].n = 0);
	SPOIL("huge k", -EINVAL, "sizes of matrix 0", c.matrices[0].k = 0xffffff80u);
	SPOIL("logical n above n", -EINVAL, "sizes of matrix 0", c.matrices[0].n_log = c.matrices[0].n + 1);
	SPOIL("logical k far below k", -EINVAL, "sizes of matrix 0", c.matrices[0].k_log = c.matrices[0].k - 128);
	SPOIL("bitrate", -EINVAL, "bitrate", c.matrices[0].rate2 = 17);
	SPOIL("half bitrate", -EINVAL, "bitrate", c.matrices[0].rate2 = 3; c.matrices[0].codebook = 1);
	SPOIL("codebook", -EINVAL, "bitrate", c.matrices[0].codebook = 3);
	SPOIL("bias", -EINVAL, "bitrate", c.matrices[0].bias = 2);
	SPOIL("bias outside", -EINVAL, "outside", c.matrices[0].bias = 1; c.matrices[0].bias_at = c.head->slab_bytes - 16);
	SPOIL("trellis that is not aligned", -EINVAL, "outside", c.matrices[0].trellis += 8);
	SPOIL("trellis past the end", -EINVAL, "outside", c.matrices[0].trellis = c.head->slab_bytes - 256);
	SPOIL("trellis that wraps", -EINVAL, "outside", c.matrices[0].trellis = -256ull);
	SPOIL("suh", -EINVAL, "outside", c.matrices[0].suh = c.head->slab_bytes);
	SPOIL("svh", -EINVAL, "outside", c.matrices[0].svh = c.head->slab_bytes + 16);
	SPOIL("name past all names", -EINVAL, "name of module 1", c.modules[1].name = (uint32_t)c.head->names_bytes);
	SPOIL("last name without an end", -EINVAL, "a name has no end", c.names[c.head->names_bytes - 1] = 'x');
	SPOIL("order", -EINVAL, "order of module 1", c.modules[1] = c.modules[0]);
	SPOIL("order of names", -EINVAL, "order of module", c.modules[c.head->nr_modules - 1].name = c.modules[0].name);
	SPOIL("kind", -EINVAL, "module", linear->kind = 4);
	SPOIL("no shards", -EINVAL, "module", linear->nr = 0);
	SPOIL("shards past the end", -EINVAL, "module", linear->first = c.head->nr_shards);
	SPOIL("shards that wrap", -EINVAL, "module", linear->first = UINT32_MAX);
	SPOIL("too many shards", -EINVAL, "module", linear->nr = EXL3_MAP_SHARDS + 1);
	SPOIL("shard that does not exist", -EINVAL, "module", c.shards[linear->first] = c.head->nr_matrices);
	SPOIL("linear with an activation", -EINVAL, "module", linear->act = EXL3_ACT_SILU);
	SPOIL("experts past the end", -EINVAL, "module", moe->nr = c.head->nr_experts + 1);
	SPOIL("expert without down", -EINVAL, "module", expert->down = EXL3_MAP_NONE);
	SPOIL("expert without gate", -EINVAL, "module", expert->gate = EXL3_MAP_NONE);
	SPOIL("gate that does not exist", -EINVAL, "module", expert->gate = c.head->nr_matrices);
	SPOIL("down in the place of up", -EINVAL, "module", expert->up = expert->down);
	SPOIL("up in the place of down", -EINVAL, "module", expert->down = expert->up);
	SPOIL("activation", -EINVAL, "module", moe->act = EXL3_ACT_NR);
	SPOIL("no activation", -EINVAL, "module", moe->act = EXL3_ACT_DEFAULT);
	SPOIL("limit", -EINVAL, "module", moe->limit = -1);
	SPOIL("limit that is no number", -EINVAL, "module", moe->limit = NAN);
	SPOIL("scale", -EINVAL, "module", moe->routed_scale = INFINITY);
	close(good);
	exl3_model_put(m);
}

/* Any bytes changed: refused, or sound. */
static void random_damage(void **state)
{
	unsigned seed = (unsigned)getpid(), taken = 0;
	struct exl3_model *m;
	int good;

	(void)state;
	print_message("seed %u\n", seed);
	fake_reset();
	m = load("tests/models/tiny-deepseek");
	good = write_table(m);
	for (int i = 0; i < 3000; i++) {
		struct copy c = copy_of(good);
		struct exl3_map_modules modules;
		struct exl3_error err = {0};
		struct exl3_map map;
		size_t nr = 1 + (size_t)rand_r(&seed) % 3;
		int fd;

		/* Names are most of it, and of little interest. */
		for (size_t k = 0; k < nr; k++)
			c.p[(size_t)rand_r(&seed) % (size_t)(c.names - c.p)] = (char)rand_r(&seed);
		fd = sealed(c.p, c.bytes, SEALS);
		if (exl3_map_read(fd, &map, &err) == 0) {
			taken++;
			if (map.head->slab_bytes == m->slab->bytes &&
			    exl3_map_build(&map, m->slab, m->ops, m->dev, &modules, &err) == 0)
				exl3_map_modules_fini(&modules);
			exl3_map_fini(&map);
		} else {
			assert_true(err.text[0]);
		}
		close(fd);
		free(c.p);
	}
	assert_true(taken > 0 && taken < 3000);
	close(good);
	exl3_model_put(m);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(what_is_written_comes_back),
		test_case(what_is_broken_is_refused),
		test_case(random_damage),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
