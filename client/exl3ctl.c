/* SPDX-License-Identifier: Apache-2.0 */
/* exl3ctl.c - the command line: options, verbs, exit codes. */
#include "client/exl3ctl.h"

#include <assert.h>
#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>

#define DEFAULT_SOCKET "/run/exl3-daemon/0.sock"

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
	G_UNLOAD = 1u << 8,
	G_CALIBRATE = 1u << 9,
	G_OUTPUT = 1u << 10,
};

#define FLAG(name, field, group, help)                                \
	{                                                             \
		name, group, offsetof(struct ctl, field), NULL, help \
	}
#define TEXT(name, field, group, arg, help)                          \
	{                                                            \
		name, group, offsetof(struct ctl, field), arg, help \
	}
/* The one table of options: parser, help, completion and hints derive from it. */
static const struct option_desc {
	const char *name;
	unsigned group;
	size_t field;
	const char *arg;  /* NULL: a flag */
	const char *help; /* with the default in brackets */
} options[] = {
	TEXT("socket", socket, G_ALL, "PATH",
	     "control socket of the daemon [$EXL3_SOCKET, else " DEFAULT_SOCKET "]"),
	TEXT("node", socket, G_ALL, "N", "the same as --socket /run/exl3-daemon/N.sock"), /* a path is made of it */
	TEXT("domain", domain, G_ALL, "D", "ask the worker of this fault domain; for administrators [the caller's]"),
	FLAG("json", json, G_JSON, "print JSON, with the field names of exl3.proto"),
	TEXT("output", output, G_RUN | G_OUTPUT, "FILE", "of the result (run: Y.npy); also -o"),
	FLAG("apply", apply, G_CALIBRATE, "what was measured counts at once [from the next start or reload with FILE on]"),
	TEXT("dtype", dtype, G_RUN, "f32|f16|bf16", "of the result; bf16 is stored as u2 [f32]"),
	FLAG("bf16", bf16, G_RUN, "u2 files hold bf16"),
	FLAG("stored", stored, G_RUN, "x and y have the stored (padded) sizes [the logical ones]"),
	FLAG("deterministic", deterministic, G_RUN, "the bits depend on this request alone"),
	TEXT("kernel", kernel, G_RUN, "NAME", "one of exl3ctl kernels [the daemon's choice]"),
	TEXT("mode", mode, G_RUN, "auto|direct|mapped", "who computes: the daemon, or exl3ctl with its weights [$EXL3_MODE, else auto]"),
	TEXT("ids", ids, G_RUN, "IDS.npy", "moe: experts of each row, i4 or i8; -1 is a hole"),
	TEXT("weights", weights, G_RUN, "W.npy", "moe: their weights"),
	TEXT("act", act, G_RUN, "ACT",
	     "mlp, moe: silu, gelu (tanh form), relu2, relu2_gated, swiglu_oai [the model's]"),
	TEXT("limit", limit, G_RUN, "F", "mlp, moe: limit of the activation [the model's]"),
	TEXT("routed-scale", routed_scale, G_RUN, "F", "moe: factor of the routed sum [the model's]"),
	TEXT("q", q, G_RUN, "Q.npy", "mla: queries [batch, heads, dim]"),
	TEXT("kv", kv, G_RUN, "KV.npy", "mla: cache [slots, dim]"),
	TEXT("indices", indices, G_RUN, "I.npy", "mla: slots of each query [batch, topk]"),
	TEXT("lse", lse, G_RUN, "L.npy", "mla: write the logarithms of the sums here"),
	TEXT("scale", scale, G_RUN, "F", "mla: factor of q kv"),
	TEXT("kv-scale", kv_scale, G_RUN, "F", "mla: factor of an e4m3 cache [1]"),
	TEXT("value-dim", value_dim, G_RUN, "D", "mla: columns of the cache that are values [min(dim, 512)]"),
	TEXT("device", device, G_DEVICE, "D",
	     "one that status lists; of run only for mla, else a model's own counts [the default device]"),
	TEXT("unquantized", unquantized, G_LOAD, "host|device", "where the unquantized tensors go [host]"),
	FLAG("no-wait", no_wait, G_WAIT, "do not wait for the end of it"),
	FLAG("wait", wait, G_UNLOAD, "wait for clients that map its weights [they are told to let go]"),
	TEXT("interval", interval, G_TOP, "SECONDS", "between two pictures [1]"),
	TEXT("count", count, G_TOP, "N", "pictures [on a terminal until Ctrl-C, else 1]"),
	FLAG("client", client_only, G_VERSION, "that of exl3ctl only; needs no daemon"),
};
#define NR_OPTIONS (sizeof(options) / sizeof(options[0]))
#define OPTION_FIRST 256 /* above all letters */
static_assert(NR_OPTIONS <= 64, "a bit of uint64_t for each");

static int ctl_help(struct ctl *c);

static const struct verb {
	const char *name, *args; /* several forms: one a line */
	int min_args, max_args;
	unsigned groups;
	int (*run)(struct ctl *c);
	const char *help; /* one sentence */
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
	{"top", "", 0, 0, G_TOP, ctl_top, "rates by model, tenant and client"},
	{"kernels", "\nMODEL MODULE", 0, 2, G_JSON | G_DEVICE, ctl_kernels,
	 "kernels for run --kernel; of a module: which one so many rows get, and why"},
	{"calibrate", "[MODEL]... [-o FILE]", 0, 64, G_CALIBRATE | G_OUTPUT, ctl_calibrate,
	 "measure which kernels are the fastest, beside the clients; FILE is for kernel-table"},
	{"run",
	 "linear MODEL MODULE X.npy -o Y.npy\n"
	 "mlp MODEL PREFIX X.npy -o Y.npy\n"
	 "moe MODEL PREFIX X.npy --ids IDS.npy --weights W.npy -o Y.npy\n"
	 "mla --q Q.npy --kv KV.npy --indices I.npy --scale F -o O.npy",
	 1, 4, G_RUN | G_DEVICE, ctl_run, "one request with NumPy files"},
	{"load", "NAME=DIR", 1, 1, G_DEVICE | G_LOAD | G_WAIT, ctl_load,
	 "load a model and wait until it is ready"},
	{"unload", "NAME", 1, 1, G_WAIT | G_UNLOAD, ctl_unload,
	 "accepted requests finish, then its memory is freed"},
	{"fds", "\ndrop NAME", 0, 2, G_JSON, ctl_fds,
	 "weights that are kept for the next worker, and who uses them; drop: keep them no longer"},
	{"drain", "", 0, 0, 0, ctl_drain, "finish what was accepted, then end the daemon"},
	{"env", "", 0, 0, 0, ctl_env,
	 "what a shell must set for programs with CUDA: eval \"$(exl3ctl env)\""},
	{"doctor", "", 0, 0, G_JSON, ctl_doctor, "look for what is wrong"},
	{"version", "", 0, 0, G_VERSION, ctl_version, "versions of both sides"},
	{"help", "[VERB]", 0, 1, 0, ctl_help, "this list, or all about one verb"},
};
#define NR_VERBS (sizeof(verbs) / sizeof(verbs[0]))

static const char exit_codes[] =
	"\nExit status: 0 done, 1 a file here, 2 usage, 3 refused by the daemon, 4 no daemon there, 5 the daemon went\n"
	"away, or Ctrl-C, after the request was sent.\n";

static void print_options(FILE *f, unsigned groups)
{
	for (size_t i = 0; i < NR_OPTIONS; i++) {
		char left[64];

		if (!(options[i].group & groups))
			continue;
		snprintf(left, sizeof(left), "--%s %s", options[i].name,
			 options[i].arg ? options[i].arg : "");
		fprintf(f, "  %-26s %s\n", left, options[i].help);
	}
}

static void print_help(FILE *f)
{
	fprintf(f, "usage: exl3ctl [OPTION]... VERB [ARGUMENT]...\n\n"
		   "Look at exl3-daemon, load and unload models, run single layers.\n\n");
	for (size_t i = 0; i < NR_VERBS; i++)
		fprintf(f, "  %-9s %-36.*s %s\n", verbs[i].name, (int)strcspn(verbs[i].args, "\n"),
			verbs[i].args, verbs[i].help);
	fprintf(f, "\n");
	print_options(f, G_ALL);
	fprintf(f, "  %-26s the same as help VERB\n%s", "VERB --help", exit_codes);
}

static void print_usage(FILE *f, const struct verb *v)
{
	const char *form = v->args, *word = "usage:";

	while (form) {
		size_t len = strcspn(form, "\n");

		fprintf(f, "%s exl3ctl [OPTION]... %s%s%.*s\n", word, v->name, len ? " " : "",
			(int)len, form);
		word = "      ";
		form = form[len] ? form + len + 1 : NULL;
	}
}

static void print_verb_help(FILE *f, const struct verb *v)
{
	print_usage(f, v);
	fprintf(f, "\n%s: %s.\n\n", v->name, v->help);
	print_options(f, v->groups);
	print_options(f, G_ALL);
	fputs(exit_codes, f);
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
	unsigned flags = EXL3_CONNECT_NO_ENV;
	int e;

	if (c->client)
		return CTL_OK;
	if (c->mode && strcmp(c->mode, "mapped") == 0)
		flags |= EXL3_CONNECT_MAPPED;
	else if (c->mode && strcmp(c->mode, "direct") == 0)
		flags |= EXL3_CONNECT_DIRECT;
	else if (c->mode && strcmp(c->mode, "auto") != 0)
		return ctl_error(CTL_USAGE, "--mode %s: auto, direct or mapped", c->mode);
	e = exl3_client_connect(c->socket, "exl3ctl", flags, c->domain, &c->client);
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

/* Why getopt refused argv[optind - 1]. */
static int bad_option(const char *text, int missing)
{
	size_t len = strcspn(text, "=");
	const char *near;
	char name[64];
	size_t same = 0;

	if (missing)
		return ctl_error(CTL_USAGE, "%s needs a value; see exl3ctl --help", text);
	if (strncmp(text, "--", 2) != 0)
		return ctl_error(CTL_USAGE, "there is no option '%s'; see exl3ctl --help", text);
	for (size_t i = 0; i < NR_OPTIONS; i++) {
		if (strlen(options[i].name) + 2 == len && !strncmp(options[i].name, text + 2, len - 2))
			return ctl_error(CTL_USAGE, "--%s takes no value", options[i].name);
		same += !strncmp(options[i].name, text + 2, len - 2);
	}
	if (same > 1)
		return ctl_error(CTL_USAGE, "%.*s stands for several options; see exl3ctl --help",
				 (int)len, text);
	snprintf(name, sizeof(name), "%.*s", (int)len - 2, text + 2);
	near = exl3_nearest(name, &options[0].name, NR_OPTIONS, sizeof(options[0]));
	return ctl_error(CTL_USAGE, "there is no option '--%s'%s%s%s; see exl3ctl --help", name,
			 near ? " (did you mean --" : "", near ? near : "", near ? "?)" : "");
}

/* Sets the options; *used: bits of those that were given. CTL_OK or CTL_USAGE. */
static int parse(struct ctl *c, int argc, char **argv, uint64_t *used)
{
	struct option longopts[NR_OPTIONS + 2] = {0};
	int at;

	/* Each has a value of its own, else getopt would take a beginning of several names for one of them. */
	for (size_t i = 0; i < NR_OPTIONS; i++)
		longopts[i] = (struct option){options[i].name,
					      options[i].arg ? required_argument : no_argument,
					      NULL, OPTION_FIRST + (int)i};
	longopts[NR_OPTIONS] = (struct option){"help", no_argument, NULL, 'h'};
	opterr = 0;
	while ((at = getopt_long(argc, argv, ":ho:", longopts, NULL)) != -1) {
		const struct option_desc *o;
		int n = at - OPTION_FIRST;

		if (at == 'h') {
			c->help = true;
			continue;
		}
		if (at == '?' || at == ':')
			return bad_option(argv[optind - 1], at == ':');
		if (at == 'o')
			for (n = 0; strcmp(options[n].name, "output") != 0;)
				n++;
		o = &options[n];
		*used |= 1ull << n;
		if (!strcmp(o->name, "node")) {
			int e = set_node(c, optarg);

			if (e != CTL_OK)
				return e;
		} else if (o->arg) {
			*(const char **)((char *)c + o->field) = optarg;
		} else {
			*(bool *)((char *)c + o->field) = true;
		}
	}
	return CTL_OK;
}

/* NULL: there is none of that name; what was wrong is printed. */
static const struct verb *look_up(const char *name)
{
	const struct verb *v = find_verb(name);
	const char *near;

	if (v)
		return v;
	near = exl3_nearest(name, &verbs[0].name, NR_VERBS, sizeof(verbs[0]));
	ctl_error(CTL_USAGE, "there is no verb '%s'%s%s%s; see exl3ctl --help", name,
		  near ? " (did you mean " : "", near ? near : "", near ? "?)" : "");
	return NULL;
}

static int ctl_help(struct ctl *c)
{
	const struct verb *v;

	if (!c->nr_args) {
		print_help(stdout);
		return CTL_OK;
	}
	v = look_up(c->args[0]);
	if (!v)
		return CTL_USAGE;
	print_verb_help(stdout, v);
	return CTL_OK;
}

static int run_verb(struct ctl *c, int argc, char **argv, uint64_t used)
{
	const struct verb *v;

	if (optind == argc) {
		print_help(c->help ? stdout : stderr);
		return c->help ? CTL_OK : CTL_USAGE;
	}
	v = look_up(argv[optind]);
	if (!v)
		return CTL_USAGE;
	if (c->help) {
		print_verb_help(stdout, v);
		return CTL_OK;
	}
	c->args = (const char *const *)(argv + optind + 1);
	c->nr_args = argc - optind - 1;
	if (c->nr_args < v->min_args || c->nr_args > v->max_args) {
		print_usage(stderr, v);
		return ctl_error(CTL_USAGE, "%s: %d argument%s given; see exl3ctl help %s", v->name,
				 c->nr_args, c->nr_args == 1 ? " is" : "s are", v->name);
	}
	for (size_t i = 0; i < NR_OPTIONS; i++)
		if (used >> i & 1 && !(options[i].group & (v->groups | G_ALL)))
			return ctl_error(CTL_USAGE, "%s does not take --%s; see exl3ctl help %s",
					 v->name, options[i].name, v->name);
	return v->run(c);
}

int main(int argc, char **argv)
{
	struct ctl c = {0};
	uint64_t used = 0;
	int e = parse(&c, argc, argv, &used);

	if (e == CTL_OK)
		e = run_verb(&c, argc, argv, used);
	c.client = exl3_close(c.client);
	if (fflush(stdout) != 0 || ferror(stdout)) {
		if (e == CTL_OK)
			e = ctl_error(CTL_LOCAL, "cannot write the output: %m");
	}
	return e;
}
