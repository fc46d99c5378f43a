/* SPDX-License-Identifier: Apache-2.0 */
/* test_guest.c - works of the daemon's own: when they may start beside those of clients, and how they end. */
#include "tests/unit/dispatch_rig.h"

#include "kernels/tuned.h"

#define MS 1000000ull

struct guest {
	struct exl3_guest g; /* first */
	unsigned ended;
	int result;
	uint64_t exec_ns;
	uint32_t again; /* works of the next start */
};

static void on_done(void *arg, int result, uint64_t exec_ns)
{
	struct guest *g = arg;

	g->ended++;
	g->result = result;
	g->exec_ns = exec_ns;
	g->g.nr = g->again;
}

static void guest_open(struct rig *r, struct guest *g)
{
	memset(g, 0, sizeof(*g));
	rig_open(r, 4, 1);
	g->g.done = on_done;
	g->g.arg = g;
	exl3_dispatch_set_guest(r->d, 0, &g->g);
}

static void guest_close(struct rig *r)
{
	while (exl3_dispatch_guest_runs(r->d, 0)) {
		dev_finish(0);
		turn(r);
	}
	exl3_dispatch_set_guest(r->d, 0, NULL);
	rig_close(r);
}

static bool is_guest(const struct exl3_work *work, const struct guest *g)
{
	return work >= g->g.works && work < g->g.works + EXL3_GUEST_WORKS;
}

static void an_idle_device_is_used(void **state)
{
	struct guest g;
	struct rig r;

	(void)state;
	guest_open(&r, &g);
	turn(&r);
	assert_int_equal(device.nr, 0); /* nothing to be started yet */
	g.g.nr = 3;
	turn(&r);
	assert_int_equal(device.nr, 3);
	assert_true(exl3_dispatch_guest_runs(r.d, 0));
	assert_true(exl3_dispatch_busy(r.d));
	dev_finish_on(&device, 0);
	turn(&r);
	assert_int_equal(g.ended, 0);
	dev_finish(-ENOMEM);
	dev_finish(0);
	turn(&r);
	assert_int_equal(g.ended, 1);
	assert_int_equal(g.result, -ENOMEM); /* of one of them */
	assert_int_equal(g.exec_ns, 15);
	assert_false(exl3_dispatch_busy(r.d));
	guest_close(&r);
}

static void clients_come_first(void **state)
{
	struct guest g;
	struct rig r;

	(void)state;
	guest_open(&r, &g);
	g.again = 1;
	g.g.nr = 1;
	turn(&r);
	assert_int_equal(device.nr, 1);
	linear(&r, 0, 1); /* behind the one that runs, and before the next */
	assert_int_equal(device.nr, 2);
	dev_finish_on(&device, 0);
	turn(&r);
	assert_int_equal(g.ended, 1);
	assert_int_equal(device.nr, 1);
	assert_false(is_guest(device.running[0], &g));
	dev_finish(0);
	turn(&r);
	expect(&r, 0, 1, 0);
	/* The client's next request may come at once: not before some milliseconds without one. */
	g.g.nr = 1;
	turn(&r);
	assert_false(exl3_dispatch_guest_runs(r.d, 0));
	r.now += 10 * MS;
	turn(&r);
	assert_true(exl3_dispatch_guest_runs(r.d, 0));
	g.again = 0;
	guest_close(&r);
}

static void a_busy_device_is_shared(void **state)
{
	unsigned guests = 0, clients = 0;
	uint64_t guest_ns = 0, all_ns = 0;
	struct guest g;
	struct rig r;

	(void)state;
	guest_open(&r, &g);
	g.again = 1;
	g.g.nr = 1;
	/* The client has always another one behind the one that runs; each launch, of either, takes a millisecond. */
	for (uint64_t i = 1; clients < 300; i++) {
		bool guest;

		linear(&r, 0, i);
		linear(&r, 1, i);
		while (device.nr) {
			guest = is_guest(device.running[0], &g);
			device.done[device.nr_done++] =
				(struct exl3_done){.tag = device.running[0]->tag, .exec_ns = MS};
			memmove(device.running, device.running + 1, --device.nr * sizeof(device.running[0]));
			guests += guest;
			clients += !guest;
			guest_ns += guest ? MS : 0;
			all_ns += MS;
			r.now += MS;
			turn(&r);
		}
		expect(&r, 0, i, 0);
		expect(&r, 1, i, 0);
	}
	assert_true(guests >= 1);
	assert_true(guest_ns * 10 < all_ns);
	g.again = 0;
	guest_close(&r);
}

static void a_full_queue_and_a_lost_device(void **state)
{
	struct guest g;
	struct rig r;

	(void)state;
	guest_open(&r, &g);
	device.submit_code = -EAGAIN;
	g.g.nr = 1;
	turn(&r);
	assert_int_equal(g.ended, 0); /* later */
	device.submit_code = 0;
	turn(&r);
	assert_int_equal(device.nr, 1);
	exl3_dispatch_fail(r.d, 0);
	assert_int_equal(g.ended, 1);
	assert_int_equal(g.result, -EIO);
	device.nr = 0;
	g.g.nr = 1;
	turn(&r);
	assert_int_equal(device.nr, 0);
	guest_close(&r);
}

static void none_when_it_drains(void **state)
{
	struct guest g;
	struct rig r;

	(void)state;
	guest_open(&r, &g);
	exl3_dispatch_drain(r.d);
	g.g.nr = 1;
	turn(&r);
	assert_int_equal(device.nr, 0);
	guest_close(&r);
}

/* A launch keeps the table that it began with. */
static void tables_of_launches(void **state)
{
	struct exl3_tuned *one = exl3_tuned_new("one"), *two = exl3_tuned_new("two");
	struct rig r;

	(void)state;
	rig_open(&r, 2, 1);
	exl3_dispatch_set_tuned(r.d, 0, one);
	linear(&r, 0, 1);
	assert_ptr_equal(device.running[0]->tuned, one);
	exl3_dispatch_set_tuned(r.d, 0, two);
	linear(&r, 0, 2);
	assert_ptr_equal(device.running[0]->tuned, one);
	assert_ptr_equal(device.running[1]->tuned, two);
	assert_int_equal(one->refs, 2);
	dev_finish(0);
	dev_finish(0);
	turn(&r);
	assert_int_equal(one->refs, 1);
	assert_int_equal(two->refs, 2);
	exl3_dispatch_set_tuned(r.d, 0, NULL);
	linear(&r, 0, 3);
	assert_null(device.running[0]->tuned);
	rig_close(&r);
	exl3_tuned_put(one);
	exl3_tuned_put(two);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(an_idle_device_is_used), test_case(clients_come_first),
		test_case(a_busy_device_is_shared), test_case(a_full_queue_and_a_lost_device),
		test_case(none_when_it_drains), test_case(tables_of_launches),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
