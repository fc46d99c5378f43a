/* SPDX-License-Identifier: Apache-2.0 */
/* test_metrics.c - buckets, labels that change hands, and the text: every line as Prometheus wants it. */
#include "tests/test.h"

#include "daemon/metrics.h"
#include "daemon/metrics_http.h"

#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>

static struct exl3_metrics m;

/* The value of the line that begins with @line and a space; -1: there is none. */
static double value_of(const char *text, const char *line)
{
	size_t len = strlen(line);

	for (const char *p = text; p; p = strchr(p, '\n') ? strchr(p, '\n') + 1 : NULL) {
		if (strncmp(p, line, len) == 0 && p[len] == ' ')
			return atof(p + len + 1);
	}
	return -1;
}

static char *print(void)
{
	char *text = NULL;
	size_t bytes = 0;
	FILE *f = open_memstream(&text, &bytes);

	assert_non_null(f);
	exl3_metrics_print(&m, f);
	fclose(f);
	return text;
}

static void expect(const char *text, const char *line, double want)
{
	double got = value_of(text, line);

	if (got != want)
		fail_msg("%s is %g, wanted %g", line, got, want);
}

static void buckets(void **state)
{
	static const struct {
		uint64_t ns;
		const char *le, *below; /* the first bucket that counts it, and the one before */
	} cases[] = {
		{0, "0.000008", NULL},          {8000, "0.000008", NULL},
		{8001, "0.000016", "0.000008"}, {16000, "0.000016", "0.000008"},
		{1000000, "0.001024", "0.000512"}, {33554432000, "33.554432", "16.777216"},
		{33554432001, "+Inf", "33.554432"}, {UINT64_MAX / 2, "+Inf", "33.554432"},
	};
	char line[128];

	(void)state;
	for (size_t i = 0; i < TEST_NR(cases); i++) {
		exl3_auto(exl3_freep) char *text = NULL;

		memset(&m, 0, sizeof(m));
		exl3_metric_launch(&m.op[EXL3_OP_LINEAR], cases[i].ns, 1, 1, 0, 0);
		text = print();
		snprintf(line, sizeof(line), "exl3_device_seconds_bucket{op=\"linear\",le=\"%s\"}",
			 cases[i].le);
		expect(text, line, 1);
		if (cases[i].below) {
			snprintf(line, sizeof(line),
				 "exl3_device_seconds_bucket{op=\"linear\",le=\"%s\"}", cases[i].below);
			expect(text, line, 0);
		}
		expect(text, "exl3_device_seconds_count{op=\"linear\"}", 1);
	}
}

static void what_is_counted(void **state)
{
	exl3_auto(exl3_freep) char *text = NULL;

	(void)state;
	memset(&m, 0, sizeof(m));
	m.generation = 3;
	exl3_metric_label_set(&m.tenant[5].label, sizeof(m.tenant[5]), "batch");
	exl3_metric_request(&m.tenant[5], EXL3_OP_MLP, 0);
	exl3_metric_request(&m.tenant[5], EXL3_OP_MLP, 0);
	exl3_metric_request(&m.tenant[5], EXL3_OP_MLP, -ETIME);
	exl3_metric_request(&m.tenant[5], 77, -EINVAL);
	exl3_metric_request(&m.tenant[5], EXL3_OP_NOP, -EXDEV);
	exl3_metric_launch(&m.op[EXL3_OP_MLP], 1500000, 3, 2, 0, 100);
	exl3_metric_launch(&m.op[EXL3_OP_MLP], 500000, 8192, 1, 1, 100);
	m.tenant[5].bytes[EXL3_BYTES_IMPORT] = 4096;
	exl3_metric_set(&m.trains, 9);
	exl3_metric_set(&m.train_late, 4);
	exl3_metric_set(&m.train_held_ns, 250000000);
	text = print();
	expect(text, "exl3_requests_total{op=\"mlp\",tenant=\"batch\",code=\"ok\"}", 2);
	expect(text, "exl3_requests_total{op=\"mlp\",tenant=\"batch\",code=\"ETIME\"}", 1);
	expect(text, "exl3_requests_total{op=\"invalid\",tenant=\"batch\",code=\"EINVAL\"}", 1);
	expect(text, "exl3_requests_total{op=\"nop\",tenant=\"batch\",code=\"other\"}", 1);
	expect(text, "exl3_launch_rows_bucket{op=\"mlp\",le=\"2\"}", 0);
	expect(text, "exl3_launch_rows_bucket{op=\"mlp\",le=\"4\"}", 1);
	expect(text, "exl3_launch_rows_bucket{op=\"mlp\",le=\"4096\"}", 1);
	expect(text, "exl3_launch_rows_bucket{op=\"mlp\",le=\"8192\"}", 2);
	expect(text, "exl3_launch_rows_sum{op=\"mlp\"}", 8195);
	expect(text, "exl3_device_seconds_sum{op=\"mlp\"}", 0.002);
	expect(text, "exl3_merged_requests_total{op=\"mlp\"}", 2);
	expect(text, "exl3_slices_total{op=\"mlp\"}", 1);
	expect(text, "exl3_weight_read_bytes_total{op=\"mlp\"}", 200);
	expect(text, "exl3_tenant_bytes{tenant=\"batch\",kind=\"import\"}", 4096);
	expect(text, "exl3_trains_total", 9);
	expect(text, "exl3_train_late_total", 4);
	expect(text, "exl3_train_held_seconds_total", 0.25);
	expect(text, "exl3_worker_generation", 3);
	expect(text, "exl3_worker_restarts_total", 2);
}

static void labels(void **state)
{
	exl3_auto(exl3_freep) char *text = NULL, *after = NULL;
	char name[EXL3_METRIC_LABEL_MAX + 40];

	(void)state;
	memset(&m, 0, sizeof(m));
	exl3_metric_add(&exl3_metrics_add_model(&m, "a\"b\\c\nd")->rows, 7);
	memset(name, 'x', sizeof(name));
	name[sizeof(name) - 1] = 0;
	assert_non_null(exl3_metrics_add_model(&m, name));
	text = print();
	expect(text, "exl3_model_rows_total{model=\"a\\\"b\\\\c\\nd\"}", 7);
	assert_null(strstr(text, name)); /* cut */
	/* Another model in its place begins at 0. */
	exl3_metric_label_drop(&m.model[0].label);
	assert_ptr_equal(exl3_metrics_add_model(&m, "next"), &m.model[0]);
	after = print();
	assert_null(strstr(after, "a\\\"b"));
	expect(after, "exl3_model_rows_total{model=\"next\"}", 0);
	/* As many as there are slots. */
	for (unsigned i = 2; i < EXL3_MODELS_MAX; i++)
		assert_non_null(exl3_metrics_add_model(&m, "m"));
	assert_null(exl3_metrics_add_model(&m, "one more"));
}

static void *change_hands(void *arg)
{
	volatile bool *stop = arg;

	while (!__atomic_load_n(stop, __ATOMIC_RELAXED)) {
		exl3_metric_label_set(&m.tenant[0].label, sizeof(m.tenant[0]), "aaaaaaaaaaaaaaaaaaaaaaaaaaaa");
		exl3_metric_label_drop(&m.tenant[0].label);
		exl3_metric_label_set(&m.tenant[0].label, sizeof(m.tenant[0]), "bbbbbbbbbbbbbbbbbbbbbbbbbbbb");
		exl3_metric_label_drop(&m.tenant[0].label);
	}
	return NULL;
}

/* A reader never sees half of one name and half of another. */
static void readers_beside_the_writer(void **state)
{
	bool stop = false;
	pthread_t writer;

	(void)state;
	memset(&m, 0, sizeof(m));
	assert_int_equal(pthread_create(&writer, NULL, change_hands, &stop), 0);
	for (int i = 0; i < 300; i++) {
		exl3_auto(exl3_freep) char *text = print();

		for (const char *p = text; (p = strstr(p, "{tenant=\"")); p += 9) {
			assert_true(strspn(p + 9, "a") == 28 || strspn(p + 9, "b") == 28);
		}
	}
	__atomic_store_n(&stop, true, __ATOMIC_RELAXED);
	pthread_join(writer, NULL);
}

/* ---- the socket ---- */

static int dial(const char *path)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);

	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", path);
	assert_int_equal(connect(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	return fd;
}

static void ask(const char *path, const char *request, const char *want)
{
	exl3_auto(exl3_closep) int fd = dial(path);
	char answer[65536] = "";
	size_t have = 0;
	ssize_t n;

	assert_int_equal(send(fd, request, strlen(request), MSG_NOSIGNAL), strlen(request));
	while ((n = recv(fd, answer + have, sizeof(answer) - 1 - have, 0)) > 0)
		have += (size_t)n;
	if (!strstr(answer, want))
		fail_msg("%.30s...: %.200s", request, answer);
}

static void the_socket(void **state)
{
	char dir[] = "/tmp/exl3-metrics-XXXXXX", path[64], longest[5000];
	struct exl3_metrics_http *h = NULL, *second = NULL;
	int stalled[20];
	struct exl3_error err;
	struct stat st;

	(void)state;
	memset(&m, 0, sizeof(m));
	m.generation = 1;
	assert_non_null(mkdtemp(dir));
	snprintf(path, sizeof(path), "%s/m.sock", dir);
	test_code(exl3_metrics_http_new(&m, path, 0, &h, &err), 0, &err);
	assert_int_equal(stat(path, &st), 0);
	assert_int_equal(st.st_mode & 0777, 0660);
	ask(path, "GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n", "\nexl3_worker_generation 1\n");
	ask(path, "GET /metrics?x=1 HTTP/1.0\r\n\r\n", "HTTP/1.1 200 OK\r\n");
	ask(path, "HEAD /metrics HTTP/1.1\r\n\r\n", "version=0.0.4");
	ask(path, "GET / HTTP/1.1\r\n\r\n", "HTTP/1.1 404 ");
	ask(path, "GET /metricsx HTTP/1.1\r\n\r\n", "HTTP/1.1 404 ");
	ask(path, "POST /metrics HTTP/1.1\r\n\r\n", "HTTP/1.1 405 ");
	memset(longest, 'x', sizeof(longest));
	longest[sizeof(longest) - 1] = 0;
	ask(path, longest, "HTTP/1.1 431 ");
	/* Scrapers that stall take places from each other, not from others. */
	for (size_t i = 0; i < TEST_NR(stalled); i++) {
		stalled[i] = dial(path);
		assert_int_equal(send(stalled[i], "GET /met", 8, MSG_NOSIGNAL), 8);
	}
	ask(path, "GET /metrics HTTP/1.1\r\n\r\n", "\nexl3_worker_generation 1\n");
	/* The next worker takes the path over; the end of this one leaves it alone. */
	test_code(exl3_metrics_http_new(&m, path, 0, &second, &err), 0, &err);
	h = exl3_metrics_http_free(h);
	ask(path, "GET /metrics HTTP/1.1\r\n\r\n", "\nexl3_worker_generation 1\n");
	second = exl3_metrics_http_free(second);
	assert_int_equal(stat(path, &st), -1);
	for (size_t i = 0; i < TEST_NR(stalled); i++)
		close(stalled[i]);
	/* No file of others is replaced. */
	fclose(fopen(path, "w"));
	test_code(exl3_metrics_http_new(&m, path, 0, &h, &err), -EEXIST, &err);
	unlink(path);
	snprintf(path, sizeof(path), "%s/none/m.sock", dir);
	test_code(exl3_metrics_http_new(&m, path, 0, &h, &err), -ENOENT, &err);
	rmdir(dir);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		test_case(buckets),    test_case(what_is_counted),
		test_case(labels),     test_case(readers_beside_the_writer),
		test_case(the_socket),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
