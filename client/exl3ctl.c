/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl.c - the command line: options, verbs, exit codes. */
#include "client/exl3ctl.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

/* Options by group; a verb names the groups that it takes. */
enum {
	G_ALL = 1u << 0,
	G_JSON = 1u << 1,
	G_RUN = 1u << 2,
	G_DEVICE = 1u << 3,
	G_LOAD = 1u << 7,
	G_WAIT = 1u << 4,
	G_TOP = 1u << 5,
	G_VERSION = 1u << 6,
};

#define FLAG(name, field, group)                                \
	{                                                       \
		name, group, offsetof(struct ctl, field), false \
	}
#define TEXT(name, field, group)                               \
	{                                                      \
		name, group, offsetof(struct ctl, field), true \
	}
static const struct option_desc {
	const char *name;
	unsigned group;
	size_t field;
	bool has_arg;
} options[] = {
	TEXT("socket", socket, G_ALL),
	TEXT("node", socket, G_ALL), /* a path is made of it */
	TEXT("domain", domain, G_ALL),
	FLAG("json", json, G_JSON),
	TEXT("output", output, G_RUN),
	TEXT("dtype", dtype, G_RUN),
	FLAG("bf16", bf16, G_RUN),
	FLAG("stored", stored, G_RUN),
	FLAG("deterministic", deterministic, G_RUN),
	TEXT("kernel", kernel, G_RUN),
	TEXT("ids", ids, G_RUN),
	TEXT("weights", weights, G_RUN),
	TEXT("act", act, G_RUN),
	TEXT("limit", limit, G_RUN),
	TEXT("routed-scale", routed_scale, G_RUN),
	TEXT("q", q, G_RUN),
	TEXT("kv", kv, G_RUN),
	TEXT("indices", indices, G_RUN),
	TEXT("lse", lse, G_RUN),
	TEXT("scale", scale, G_RUN),
	TEXT("kv-scale", kv_scale, G_RUN),
	TEXT("value-dim", value_dim, G_RUN),
	TEXT("device", device, G_DEVICE),
	TEXT("unquantized", unquantized, G_LOAD),
	FLAG("no-wait", no_wait, G_WAIT),
	TEXT("interval", interval, G_TOP),
	TEXT("count", count, G_TOP),
	FLAG("client", client_only, G_VERSION),
};
#define NR_OPTIONS (sizeof(options) / sizeof(options[0]))

static const struct verb {
	const char *name, *args;
	int min_args, max_args;
	unsigned groups;
	int (*run)(struct ctl *c);
	const char *help;
} verbs[] = {
	{"status", "", 0, 0, G_JSON, ctl_status, "what the daemon is, holds and does"},
	{"models", "", 0, 0, G_JSON, ctl_models, "models and their state"},
	{"modules", "MODEL", 1, 1, G_JSON, ctl_modules,
	 "what can be multiplied: shapes, bits, codebooks"},
	{"tensors", "MODEL", 1, 1, G_JSON, ctl_tensors, "unquantized tensors"},
	{"resolve", "MODEL NAME", 2, 2, G_JSON, ctl_resolve, "how a name is matched, step by step"},
	{"ps", "", 0, 0, G_JSON, ctl_ps, "clients and what they hold"},
	{"domains", "", 0, 0, G_JSON, ctl_domains, "fault domains, their state and generation"},
	{"events", "", 0, 0, G_JSON, ctl_events, "what happened to the fault domains, and why"},
	{"tenants", "", 0, 0, G_JSON, ctl_tenants, "tenants: limits, what they hold and have done"},
	{"top", "", 0, 0, G_TOP, ctl_top,
	 "rates by model, tenant and client [--interval SECONDS] [--count N]"},
	{"kernels", "", 0, 0, G_JSON | G_DEVICE, ctl_kernels,
	 "kernels for run --kernel [--device D]"},
	{"run", "linear MODEL MODULE X.npy -o Y.npy", 1, 4, G_RUN | G_DEVICE, ctl_run,
	 "one request with NumPy files; see run --help"},
	{"load", "NAME=DIR", 1, 1, G_DEVICE | G_LOAD | G_WAIT, ctl_load,
	 "load a model [--device D] [--unquantized host|device] [--no-wait]"},
	{"unload", "NAME", 1, 1, G_WAIT, ctl_unload,
	 "accepted requests finish, then its memory is freed"},
	{"fds", "[drop NAME]", 0, 2, G_JSON, ctl_fds,
	 "weights that are kept for the next worker, and who uses them; drop: keep them no longer"},
	{"drain", "", 0, 0, 0, ctl_drain, "finish what was accepted, then end the daemon"},
	{"env", "", 0, 0, 0, ctl_env, "what a shell must set for programs with CUDA: eval \"$(exl3ctl env)\""},
	{"doctor", "", 0, 0, G_JSON, ctl_doctor, "look for what is wrong"},
	{"version", "", 0, 0, G_VERSION, ctl_version, "versions of both sides [--client]"},
};
#define NR_VERBS (sizeof(verbs) / sizeof(verbs[0]))

static void print_help(FILE *f)
{
	fprintf(f, "usage: exl3ctl [--socket PATH | --node N] [--domain D] VERB ...\n\n");
	for (size_t i = 0; i < NR_VERBS; i++)
		fprintf(f, "  %-8s %-36s %s\n", verbs[i].name, verbs[i].args, verbs[i].help);
	fprintf(f,
		"\nListings take --json. Without --socket: $EXL3_SOCKET, else %s.\n"
		"Status: 0 done, 1 a file here, 2 usage, 3 refused, 4 no daemon, 5 the daemon went "
		"away.\n",
		"/run/exl3-daemon/0.sock");
}

static void print_run_help(FILE *f)
{
	fputs("usage: exl3ctl run linear MODEL MODULE X.npy -o Y.npy\n"
	      "       exl3ctl run mlp MODEL PREFIX X.npy -o Y.npy [--act A] [--limit F]\n"
	      "       exl3ctl run moe MODEL PREFIX X.npy --ids IDS.npy --weights W.npy -o Y.npy\n"
	      "                       [--act A] [--limit F] [--routed-scale F]\n"
	      "       exl3ctl run mla --q Q.npy --kv KV.npy --indices I.npy --scale F -o O.npy\n"
	      "                       [--value-dim D] [--kv-scale F] [--lse L.npy] [--device D]\n\n"
	      "  --dtype f32|f16|bf16  of the output (f32); bf16 is stored as u2\n"
	      "  --bf16                u2 files hold bf16\n"
	      "  --stored              x and y have the stored (padded) sizes\n"
	      "  --deterministic       the bits depend on this request alone\n"
	      "  --device D            where MLA runs; other operations run where their model lives\n"
	      "  --kernel NAME         instead of the daemon's choice; see kernels\n"
	      "  --act                 silu, gelu (tanh form), relu2, relu2_gated, swiglu_oai; "
	      "default: the model's\n",
	      f);
}

static void help(int argc, char **argv)
{
	for (int i = 1; i < argc; i++)
		if (!strcmp(argv[i], "run")) {
			print_run_help(stdout);
			return;
		}
	print_help(stdout);
}

int ctl_error(enum ctl_exit code, const char *fmt, ...)
{
	char text[EXL3_ERROR_TEXT_MAX + 64];
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(text, sizeof(text), fmt, ap);
	va_end(ap);
	fprintf(stderr, "exl3ctl: %s\n", ctl_safe(text));
	return code;
}

int ctl_failed(const struct ctl *c)
{
	/* A channel may end a moment before the connection does. */
	int code = exl3_client_err()->code;
	/* A failed device is an answer, though its worker leaves right after it. */
	bool lost = code == -ESTALE || (code != -EIO && !exl3_alive(c->client));

	return ctl_error(lost ? CTL_LOST : CTL_REFUSED, "%s", exl3_last_error());
}

static void on_interrupt(int sig)
{
	static const char text[] =
		"\nexl3ctl: interrupted; what was sent may still be carried out\n";

	(void)sig;
	(void)!write(STDERR_FILENO, text, sizeof(text) - 1);
	_exit(CTL_LOST);
}

int ctl_connect(struct ctl *c)
{
	int e;

	if (c->client)
		return CTL_OK;
	e = exl3_client_connect(c->socket, "exl3ctl", EXL3_CONNECT_NO_ENV, c->domain, &c->client);
	if (e == 0) {
		struct sigaction sa = {.sa_handler = on_interrupt};

		sigaction(SIGINT, &sa, NULL);
		return CTL_OK;
	}
	switch (e) {
	case -EPROTO:
	case -EDQUOT:
	case -EPERM:
	case -ESHUTDOWN:
	case -EOPNOTSUPP:
		return ctl_error(CTL_REFUSED, "%s", exl3_last_error());
	case -EACCES:
		return ctl_error(CTL_UNREACHABLE, "%s", exl3_last_error());
	case -ENOENT:
	case -ECONNREFUSED:
		return ctl_error(CTL_UNREACHABLE,
				 "%s; is exl3-daemon running, and does --socket or $EXL3_SOCKET "
				 "name its socket?",
				 exl3_last_error());
	default:
		return ctl_error(CTL_UNREACHABLE, "%s: %s", exl3_client_path(c->socket),
				 exl3_last_error());
	}
}

int ctl_call(struct ctl *c, Exl3__Request *req, Exl3__Reply__BodyCase want, uint64_t timeout_ns,
	     Exl3__Reply **ret)
{
	int e = ctl_connect(c);

	if (e != CTL_OK)
		return e;
	e = exl3_client_call(c->client, req, want, timeout_ns, ret, NULL, 0);
	return e < 0 ? ctl_failed(c) : CTL_OK;
}

static const struct verb *find_verb(const char *name)
{
	for (size_t i = 0; i < NR_VERBS; i++)
		if (!strcmp(verbs[i].name, name))
			return &verbs[i];
	return NULL;
}

static int set_node(struct ctl *c, const char *text)
{
	char *end;
	unsigned long n;

	errno = 0;
	n = strtoul(text, &end, 10);
	if (errno || *end || end == text || *text == '-' || n > 4095)
		return ctl_error(CTL_USAGE, "--node %s: not a node number", text);
	snprintf(c->socket_buf, sizeof(c->socket_buf), "/run/exl3-daemon/%lu.sock", n);
	c->socket = c->socket_buf;
	return CTL_OK;
}

/* Sets the options; *used: their groups. 0, or an exit code; -1: help was printed. */
static int parse(struct ctl *c, int argc, char **argv, unsigned *used)
{
	struct option longopts[NR_OPTIONS + 2] = {0};
	int at, n = -1;

	for (size_t i = 0; i < NR_OPTIONS; i++)
		longopts[i] = (struct option){options[i].name,
					      options[i].has_arg ? required_argument : no_argument,
					      NULL, 0};
	longopts[NR_OPTIONS] = (struct option){"help", no_argument, NULL, 'h'};
	while ((at = getopt_long(argc, argv, "ho:", longopts, &n)) != -1) {
		const struct option_desc *o;

		if (at == 'h') {
			help(argc, argv);
			return -1;
		}
		if (at == 'o') {
			c->output = optarg;
			*used |= G_RUN;
			continue;
		}
		if (at != 0)
			return CTL_USAGE; /* getopt has said why */
		o = &options[n];
		*used |= o->group;
		if (!strcmp(o->name, "node")) {
			int e = set_node(c, optarg);

			if (e != CTL_OK)
				return e;
		} else if (o->has_arg) {
			*(const char **)((char *)c + o->field) = optarg;
		} else {
			*(bool *)((char *)c + o->field) = true;
		}
	}
	return CTL_OK;
}

static int run_verb(struct ctl *c, int argc, char **argv, unsigned used)
{
	const struct verb *v;

	if (optind == argc) {
		print_help(stderr);
		return CTL_USAGE;
	}
	v = find_verb(argv[optind]);
	if (!v)
		return ctl_error(CTL_USAGE, "there is no verb '%s'; see exl3ctl --help",
				 argv[optind]);
	c->args = (const char *const *)(argv + optind + 1);
	c->nr_args = argc - optind - 1;
	if (c->nr_args < v->min_args || c->nr_args > v->max_args)
		return ctl_error(CTL_USAGE, "usage: exl3ctl %s%s%s", v->name, *v->args ? " " : "",
				 v->args);
	if (used & ~(v->groups | G_ALL))
		return ctl_error(CTL_USAGE,
				 "%s does not take one of these options; see exl3ctl --help",
				 v->name);
	return v->run(c);
}

int main(int argc, char **argv)
{
	struct ctl c = {0};
	unsigned used = 0;
	int e = parse(&c, argc, argv, &used);

	if (e == CTL_OK)
		e = run_verb(&c, argc, argv, used);
	else if (e < 0)
		e = CTL_OK;
	c.client = exl3_close(c.client);
	if (fflush(stdout) != 0 || ferror(stdout)) {
		if (e == CTL_OK)
			e = ctl_error(CTL_LOCAL, "cannot write the output: %m");
	}
	return e;
}
