/* SPDX-License-Identifier: Apache-2.0 */
/* test_events.c - the ring of the last events: numbers, what falls out, text and back. */
#include "tests/test.h"

#include "daemon/events.h"

static unsigned count(const struct exl3_events *ev, uint64_t from, uint64_t *first)
{
	const struct exl3_event *e;
	unsigned n = 0;

	*first = 0;
	while ((e = exl3_events_from(ev, from))) {
		if (!n++)
			*first = e->id;
		from = e->id + 1;
	}
	return n;
}

static void keeps_the_last(void **state)
{
	static struct exl3_events ev;
	uint64_t first;

	(void)state;
	assert_null(exl3_events_from(&ev, 0));
	for (unsigned i = 1; i <= EXL3_EVENTS_MAX + 1; i++) {
		const struct exl3_event *e =
			exl3_events_add(&ev, "batch", i, "died", "worker %u\n", i);

		assert_int_equal(e->id, i);
		assert_string_equal(e->domain, "batch");
		assert_int_equal(e->text[strlen(e->text) - 1], '?');
		if (i == 1 || i == EXL3_EVENTS_MAX - 1 || i == EXL3_EVENTS_MAX) {
			assert_int_equal(count(&ev, 0, &first), i);
			assert_int_equal(first, 1);
		}
	}
	assert_int_equal(count(&ev, 0, &first), EXL3_EVENTS_MAX);
	assert_int_equal(first, 2);
	assert_int_equal(exl3_events_from(&ev, 2)->generation, 2);
	assert_int_equal(count(&ev, EXL3_EVENTS_MAX + 1, &first), 1);
	assert_int_equal(count(&ev, EXL3_EVENTS_MAX + 2, &first), 0);
}

/* A worker gets them from the supervisor, maybe not all. */
static void takes_others(void **state)
{
	static struct exl3_events from, to;
	char line[EXL3_EVENT_LINE_MAX];
	const struct exl3_event *e;
	struct exl3_event back;
	uint64_t first;

	(void)state;
	for (unsigned i = 1; i <= 10; i++) {
		e = exl3_events_add(&from, "default", 3, "given-up", "a sentence, %u times  over", i);
		exl3_event_format(e, line);
		assert_int_equal(exl3_event_parse(line, &back), 0);
		assert_memory_equal(&back, e, sizeof(back));
		if (i != 4)
			assert_int_equal(exl3_events_put(&to, &back), 0);
	}
	assert_int_equal(exl3_events_put(&to, &back), -EINVAL);
	assert_int_equal(count(&to, 0, &first), 9);
	assert_int_equal(exl3_events_from(&to, 4)->id, 5);
	/* A gap longer than the ring leaves nothing old behind. */
	back.id = 10 + 2 * EXL3_EVENTS_MAX;
	assert_int_equal(exl3_events_put(&to, &back), 0);
	assert_int_equal(count(&to, 0, &first), 1);
	assert_int_equal(first, back.id);
}

static void refuses_other_lines(void **state)
{
	static const char *const lines[] = {"", "1", "1 2 3", "1 2 3 default", "1 2 3 default died",
					    "x 2 3 default died text",
					    "1 2 3 default a-kind-that-is-too-long text"};
	struct exl3_event e;

	(void)state;
	for (size_t i = 0; i < TEST_NR(lines); i++)
		assert_int_equal(exl3_event_parse(lines[i], &e), -EINVAL);
	assert_int_equal(exl3_event_parse("1 2 3 default died ", &e), 0);
	assert_string_equal(e.text, "");
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(keeps_the_last),
		test_case(takes_others),
		test_case(refuses_other_lines),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
