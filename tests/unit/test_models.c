/* SPDX-License-Identifier: Apache-2.0 */
/* test_models.c - names of models: loads, refusals, unloads while requests still need the weights. */
#include "tests/test.h"

#include "daemon/log.h"
#include "daemon/models.h"
#include "tests/unit/fake_backend.h"

#include <limits.h>

struct rig {
	struct exl3_loop *loop;
	struct exl3_jobs *jobs;
	struct exl3_models all;
	struct exl3_device device;
	unsigned events[EXL3_MODELS_GONE + 1];
	char path[PATH_MAX];
};

static void on_event(void *arg, struct exl3_registered *reg, enum exl3_models_event event)
{
	struct rig *r = arg;

	assert_non_null(reg->name);
	r->events[event]++;
}

static void rig_open(struct rig *r)
{
	struct exl3_error err;

	memset(r, 0, sizeof(*r));
	fake_reset();
	exl3_log_set_level((enum exl3_log_level)0);
	assert_non_null(realpath("tests/models/tiny-llama", r->path));
	test_code(exl3_loop_new(&r->loop, &err), 0, &err);
	test_code(exl3_jobs_new(r->loop, "test-load", &r->jobs, &err), 0, &err);
	exl3_models_init(&r->all, r->loop, r->jobs);
	r->device = (struct exl3_device){.ops = &fake_ops, .dev = fake_dev(), .name = "fake:0"};
	r->all.event = on_event;
	r->all.arg = r;
}

static void rig_close(struct rig *r)
{
	exl3_models_unload_all(&r->all);
	r->jobs = exl3_jobs_free(r->jobs);
	assert_null(r->all.list);
	assert_int_equal(fake.slabs, 0); /* all weights are gone */
	exl3_loop_free(r->loop);
}

static void wait_event(struct rig *r, enum exl3_models_event event, unsigned count)
{
	while (r->events[event] < count) {
		exl3_loop_wait(r->loop, UINT64_MAX);
		exl3_loop_poll(r->loop, exl3_now_ns());
	}
}

static struct exl3_registered *load(struct rig *r, const char *name)
{
	struct exl3_registered *reg = NULL;
	struct exl3_error err;

	test_code(exl3_models_load(&r->all, name, r->path, &r->device, false, false, &reg, &err), 0, &err);
	return reg;
}

static void load_use_unload(void **state)
{
	struct exl3_registered *reg, *other;
	struct exl3_error err;
	struct rig r;

	(void)state;
	rig_open(&r);
	reg = load(&r, "a");
	assert_int_equal(exl3_models_usable(reg, &err), -EAGAIN);
	assert_non_null(strstr(err.text, "still loading"));
	assert_int_equal(exl3_models_load(&r.all, "a", r.path, &r.device, false, false, &other, &err), -EEXIST);
	wait_event(&r, EXL3_MODELS_LOADED, 1);
	assert_int_equal(exl3_models_usable(reg, &err), 0);
	assert_ptr_equal(exl3_models_find(&r.all, "a"), reg);
	assert_null(exl3_models_find(&r.all, "b"));
	assert_int_equal(fake.slabs, 1);

	/* A handle and a request: the name goes at once, the weights with the request, the rest with the handle. */
	exl3_registered_get(reg);
	exl3_registered_pin(reg);
	exl3_models_unload(reg);
	exl3_models_unload(reg);
	assert_null(exl3_models_find(&r.all, "a"));
	assert_int_equal(exl3_models_usable(reg, &err), -ENOENT);
	assert_int_equal(fake.slabs, 1);
	other = load(&r, "a"); /* the name is free for another */
	assert_ptr_not_equal(other, reg);
	wait_event(&r, EXL3_MODELS_LOADED, 2);
	assert_int_equal(fake.slabs, 2);
	exl3_registered_unpin(reg);
	wait_event(&r, EXL3_MODELS_GONE, 1);
	assert_int_equal(fake.slabs, 1);
	assert_int_equal(exl3_models_usable(reg, &err), -ENOENT);
	exl3_registered_put(reg);
	rig_close(&r);
}

static void refusals(void **state)
{
	struct exl3_registered *reg = NULL;
	struct exl3_error err;
	struct rig r;

	(void)state;
	rig_open(&r);
	assert_int_equal(exl3_models_load(&r.all, "a", "relative", &r.device, false, false, &reg, &err), -EINVAL);
	assert_int_equal(exl3_models_load(&r.all, "a b", r.path, &r.device, false, false, &reg, &err), -EINVAL);
	assert_int_equal(exl3_models_load(&r.all, "", r.path, &r.device, false, false, &reg, &err), -EINVAL);
	assert_null(r.all.list);
	/* A load that fails stays listed, with its reason, until it is unloaded or loaded again. */
	fake.fail_slab = true;
	reg = load(&r, "a");
	wait_event(&r, EXL3_MODELS_FAILED, 1);
	assert_int_equal(exl3_models_usable(reg, &err), -EIO);
	assert_non_null(strstr(err.text, "was refused"));
	assert_ptr_equal(exl3_models_find(&r.all, "a"), reg);
	fake.fail_slab = false;
	exl3_models_unload(reg);
	wait_event(&r, EXL3_MODELS_GONE, 1);
	load(&r, "a");
	wait_event(&r, EXL3_MODELS_LOADED, 1);
	rig_close(&r);
}

/* A load takes the place of one that failed, of no other; one that cannot even begin leaves it as it was. */
static void load_again_after_a_failure(void **state)
{
	struct exl3_registered *failed, *reg = NULL;
	struct exl3_error err;
	struct rig r;

	(void)state;
	rig_open(&r);
	fake.fail_slab = true;
	failed = load(&r, "a");
	wait_event(&r, EXL3_MODELS_FAILED, 1);
	assert_int_equal(exl3_models_load(&r.all, "a", "relative", &r.device, false, false, &reg, &err), -EINVAL);
	assert_ptr_equal(exl3_models_find(&r.all, "a"), failed);
	failed = load(&r, "a"); /* fails again */
	wait_event(&r, EXL3_MODELS_FAILED, 2);
	wait_event(&r, EXL3_MODELS_GONE, 1);
	assert_ptr_equal(exl3_models_find(&r.all, "a"), failed);
	fake.fail_slab = false;
	reg = load(&r, "a");
	assert_ptr_equal(exl3_models_find(&r.all, "a"), reg);
	assert_int_equal(exl3_models_load(&r.all, "a", r.path, &r.device, false, false, &failed, &err), -EEXIST);
	wait_event(&r, EXL3_MODELS_LOADED, 1);
	wait_event(&r, EXL3_MODELS_GONE, 2);
	assert_int_equal(exl3_models_usable(reg, &err), 0);
	assert_int_equal(r.all.nr, 1);
	assert_int_equal(exl3_models_load(&r.all, "a", r.path, &r.device, false, false, &failed, &err), -EEXIST);
	rig_close(&r);
}

/* An unload right after a load: whatever the loader was at, the outcome is that it is gone. */
static void unload_while_loading(void **state)
{
	struct rig r;

	(void)state;
	rig_open(&r);
	for (unsigned i = 1; i <= 5; i++) {
		struct exl3_registered *reg = load(&r, "a");

		exl3_models_unload(reg);
		wait_event(&r, EXL3_MODELS_GONE, i);
	}
	assert_int_equal(r.events[EXL3_MODELS_FAILED], 0);
	assert_int_equal(r.all.nr, 0);
	assert_int_equal(r.all.nr_loading, 0);
	load(&r, "b"); /* still loading when everything ends */
	rig_close(&r);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(load_use_unload),
		test_case(refusals),
		test_case(load_again_after_a_failure),
		test_case(unload_while_loading),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
