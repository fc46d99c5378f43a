/* SPDX-License-Identifier: Apache-2.0 */
/* library.c - libexl3-mapped.so: devices of this process, weights that were mapped, and requests on them. */
#include "client/mapped/mapped.h"
#include "kernels/check.h"
#include "kernels/map.h"

#include <errno.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- devices: one each, shared by all clients and models of the process ---- */

struct device {
	struct device *next;
	const struct exl3_backend_ops *ops;
	struct exl3_dev *dev; /* owned */
	struct exl3_dev_info info;
	uint32_t nr_kernels;
	uint32_t refs; /* under lock */
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct device *devices; /* under lock */

static bool is_gpu(const struct device *d)
{
	return strcmp(d->ops->name, "cpu") != 0;
}

/* Threads that a device of the processor uses: $EXL3_THREADS, else all of its node. */
static unsigned threads_wanted(void)
{
	const char *text = getenv("EXL3_THREADS");
	long n = text ? strtol(text, NULL, 10) : 0;

	return n > 0 && n < 1024 ? (unsigned)n : 0;
}

static int device_open(const struct exl3_map_head *h, struct device **ret, struct exl3_error *err)
{
	const struct exl3_backend_ops *ops = exl3_backend_find(h->backend);
	struct exl3_dev_options opt = {.numa_node = -1, .threads = threads_wanted()};
	struct device *d;
	sigset_t all, old;
	int node, rc;

	if (!ops)
		return exl3_errf(err, -EOPNOTSUPP, "the model is on %s, and this process has no %s backend: %s", h->device,
				 h->backend, exl3_backend_plugin_error() ? exl3_backend_plugin_error() : "unknown");
	if (!ops->track_new || !ops->slab_adopt)
		return exl3_errf(err, -EOPNOTSUPP, "the %s backend cannot run works of a client", h->backend);
	if (strcmp(h->backend, "cpu") != 0)
		opt.uuid = h->uuid;
	else if (sscanf(h->uuid, "cpu-node%d", &node) == 1)
		opt.numa_node = node;
	d = calloc(1, sizeof(*d));
	if (!d)
		return exl3_errf(err, -ENOMEM, "mapped: out of memory");
	/* The program's signals are none of its threads' business. */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	rc = ops->open(&opt, &d->dev, err);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	if (rc < 0) {
		free(d);
		return rc;
	}
	d->ops = ops;
	ops->info(d->dev, &d->info);
	while (ops->kernels[d->nr_kernels].name)
		d->nr_kernels++;
	*ret = d;
	return 0;
}

static void device_close(struct device *d)
{
	d->ops->close(d->dev);
	free(d);
}

/* Weights are made for one device and driver. */
static int check_device(const struct device *d, const struct exl3_map_head *h, struct exl3_error *err)
{
	if (strcmp(d->info.uuid, h->uuid) != 0)
		return exl3_errf(err, -EINVAL, "the model is on %s %s, what this process has is %s", h->backend, h->uuid,
				 d->info.uuid);
	if (strcmp(d->info.driver, h->driver) != 0)
		return exl3_errf(err, -EINVAL, "the daemon uses driver %s, this process %s", h->driver, d->info.driver);
	return 0;
}

static int device_get(const struct exl3_map_head *h, struct device **ret, struct exl3_error *err)
{
	struct device *d;
	int rc = 0;

	pthread_mutex_lock(&lock);
	for (d = devices; d; d = d->next)
		if (!strcmp(d->ops->name, h->backend) && !strcmp(d->info.uuid, h->uuid))
			break;
	if (!d) {
		rc = device_open(h, &d, err);
		if (rc == 0) {
			rc = check_device(d, h, err);
			if (rc < 0)
				device_close(d);
		}
		if (rc == 0) {
			d->next = devices;
			devices = d;
		}
	}
	if (rc == 0) {
		d->refs++;
		*ret = d;
	}
	pthread_mutex_unlock(&lock);
	return rc;
}

static struct device *device_ref(struct device *d)
{
	pthread_mutex_lock(&lock);
	d->refs++;
	pthread_mutex_unlock(&lock);
	return d;
}

static void device_put(struct device *d)
{
	struct device **p = &devices;

	if (!d)
		return;
	pthread_mutex_lock(&lock);
	if (--d->refs == 0) {
		while (*p != d)
			p = &(*p)->next;
		*p = d->next;
	} else {
		d = NULL;
	}
	if (d)
		device_close(d); /* before somebody opens it again */
	pthread_mutex_unlock(&lock);
}

/* ---- models ---- */

struct exl3_mapped_model {
	struct device *device; /* counted */
	struct exl3_map map;
	struct exl3_slab *slab; /* owned */
	struct exl3_map_modules modules;
};

static struct exl3_mapped_model *model_close(struct exl3_mapped_model *m)
{
	if (!m)
		return NULL;
	exl3_map_modules_fini(&m->modules);
	if (m->slab)
		m->device->ops->slab_free(m->slab);
	exl3_map_fini(&m->map);
	device_put(m->device);
	free(m);
	return NULL;
}

static int model_open(int slab_fd, int table_fd, const char *fingerprint, struct exl3_mapped_model **ret,
		      struct exl3_error *err)
{
	struct exl3_mapped_model *m = calloc(1, sizeof(*m));
	int rc;

	if (!m)
		return exl3_errf(err, -ENOMEM, "mapped: out of memory");
	rc = exl3_map_read(table_fd, &m->map, err);
	if (rc == 0 && strcmp(m->map.head->fingerprint, fingerprint) != 0)
		rc = exl3_errf(err, -EINVAL, "the table of modules is of a model with fingerprint %s, not %s",
			       m->map.head->fingerprint, fingerprint);
	if (rc == 0)
		rc = device_get(m->map.head, &m->device, err);
	if (rc == 0)
		rc = m->device->ops->slab_adopt(m->device->dev, slab_fd, m->map.head->slab_bytes, &m->slab, err);
	if (rc == 0) {
		rc = exl3_map_build(&m->map, m->slab, m->device->ops, m->device->dev, &m->modules, err);
		if (rc < 0)
			m->slab->fd = -1; /* it is still the caller's */
	}
	if (rc < 0)
		model_close(m);
	else
		*ret = m;
	return rc;
}

static const struct exl3_module_desc *find(const struct exl3_mapped_model *m, const char *name, unsigned kind)
{
	return exl3_map_find(&m->modules, name, (enum exl3_module_kind)kind);
}

static const char *device_name(const struct exl3_mapped_model *m, int *gpu)
{
	*gpu = is_gpu(m->device) ? m->device->info.ordinal : -1;
	return m->map.head->device;
}

/* ---- requests ---- */

/* What a lane has on one device. */
struct place {
	struct device *device;    /* counted */
	struct exl3_track *track; /* owned */
};

struct exl3_mapped_lane {
	struct exl3_mapped_env env;
	struct exl3_check_env check; /* its buffers are our own */
	struct place places[EXL3_DEVICES_MAX];
	uint32_t nr_places;
	uint32_t place;           /* of the request that is being checked, as the next two */
	void *stream;
	struct exl3_mla_geometry geometry;
	uint32_t id;              /* of the buffer that was asked for */
	int error;                /* why the target could not be used, though there is one */
};

static int place_of(struct exl3_mapped_lane *lane, struct device *d, uint32_t *ret)
{
	const struct exl3_track_options opt = {.deterministic = false};
	struct exl3_track *track;
	int rc;

	for (*ret = 0; *ret < lane->nr_places; (*ret)++)
		if (lane->places[*ret].device == d)
			return 0;
	if (lane->nr_places == EXL3_DEVICES_MAX)
		return -ENODEV;
	rc = d->ops->track_new(d->dev, &opt, &track, NULL);
	if (rc < 0)
		return rc;
	lane->check.kernels[*ret] = (struct exl3_check_kernels){d->ops->kernels, d->nr_kernels};
	lane->places[lane->nr_places++] = (struct place){device_ref(d), track};
	return 0;
}

/* The daemon has accepted it, so it is refused by another version only. */
static int geometry_of(const struct exl3_mla_shape *shape, struct exl3_mla_geometry *ret)
{
	*ret = (struct exl3_mla_geometry){
		.heads = shape->heads,
		.dim = shape->dim,
		.value_dim = shape->value_dim,
		.topk = shape->topk,
		.slots = shape->slots,
		.cache_stride = shape->cache_stride,
		.indices_stride = shape->indices_stride,
		.cache_dtype = (uint8_t)shape->cache_dtype,
		.indices_dtype = (uint8_t)shape->indices_dtype,
		.page_rows = shape->page_rows,
		.table_queries = shape->table_queries,
	};
	return exl3_check_geometry(ret, NULL) < 0 ? -ENOENT : 0;
}

static int on_target(void *arg, uint32_t handle, struct exl3_target *ret)
{
	struct exl3_mapped_lane *lane = arg;
	struct exl3_mapped_target t = {0};
	int rc = lane->env.target(lane->env.arg, handle, &t);

	*ret = (struct exl3_target){.desc = t.desc};
	if (rc < 0)
		return rc;
	rc = place_of(lane, t.model->device, &ret->device);
	if (rc < 0) {
		lane->error = rc; /* whatever the check makes of it */
		return -ENOENT;
	}
	if (t.mla) {
		rc = geometry_of(t.mla, &lane->geometry);
		if (rc < 0)
			return rc;
		ret->mla = &lane->geometry;
	}
	lane->place = ret->device;
	lane->stream = t.stream;
	lane->check.deterministic = t.model->map.head->flags & EXL3_MAP_DETERMINISTIC;
	return 0;
}

/* The checker wants an object for each buffer; all that it does with it is to ask for its extent. */
static struct exl3_buffer *on_buffer(void *arg, uint32_t id)
{
	struct exl3_mapped_lane *lane = arg;

	lane->id = id;
	return arg;
}

static bool on_extent(const struct exl3_buffer *buf, uint32_t device, struct exl3_extent *ret)
{
	const struct exl3_mapped_lane *lane = (const void *)buf;

	struct exl3_mapped_extent e;

	if (!lane->env.extent(lane->env.arg, lane->id, is_gpu(lane->places[device].device), &e))
		return false;
	*ret = (struct exl3_extent){.base = e.base, .bytes = e.bytes, .device = e.device};
	return true;
}

static int lane_new(const struct exl3_mapped_env *env, struct exl3_mapped_lane **ret, struct exl3_error *err)
{
	struct exl3_mapped_lane *lane = calloc(1, sizeof(*lane));

	if (!lane)
		return exl3_errf(err, -ENOMEM, "mapped: out of memory");
	lane->env = *env;
	lane->check = (struct exl3_check_env){
		.buffer = on_buffer, .extent = on_extent, .target = on_target, .arg = lane, .stream = true};
	*ret = lane;
	return 0;
}

static struct exl3_mapped_lane *lane_free(struct exl3_mapped_lane *lane)
{
	if (!lane)
		return NULL;
	for (uint32_t i = 0; i < lane->nr_places; i++) {
		lane->places[i].device->ops->track_free(lane->places[i].track);
		device_put(lane->places[i].device);
	}
	free(lane);
	return NULL;
}

/* False: refused, *@ret says why. */
static bool check_entry(struct exl3_mapped_lane *lane, const struct exl3_sqe *sqe, struct exl3_checked *c,
			struct exl3_cqe *ret)
{
	enum exl3_detail detail;

	*ret = (struct exl3_cqe){.user_data = sqe->user_data};
	lane->error = 0;
	ret->result = exl3_check_sqe(sqe, &lane->check, c, &detail);
	if (ret->result == 0)
		return true;
	ret->detail = lane->error ? EXL3_DETAIL_NONE : detail;
	if (lane->error)
		ret->result = lane->error;
	return false;
}

static void check(struct exl3_mapped_lane *lane, const struct exl3_sqe *sqe, struct exl3_cqe *ret)
{
	struct exl3_checked c;

	check_entry(lane, sqe, &c, ret);
}

static int run(struct exl3_mapped_lane *lane, const struct exl3_sqe *sqe, struct exl3_cqe *ret)
{
	struct exl3_checked c;
	struct exl3_work work;
	uint64_t skipped = 0, start;
	const struct place *p;
	bool gpu;

	if (!check_entry(lane, sqe, &c, ret))
		return 0;
	if (c.op == EXL3_OP_NOP || c.op == EXL3_OP_CANCEL)
		return 0;
	p = &lane->places[lane->place];
	gpu = is_gpu(p->device);
	exl3_work_describe(&work, &c);
	work.rows = &c.rows;
	work.nr_rows = 1;
	work.skipped = &skipped;
	if (c.op == EXL3_OP_MOE)
		work.u.moe.routes = &c.u.route;
	else if (c.op == EXL3_OP_MLA_DECODE)
		work.u.mla.caches = &c.u.mla.cache;
	start = exl3_now_ns();
	ret->result = p->device->ops->track_run(p->track, &work, gpu ? lane->stream : NULL);
	if (!gpu)
		ret->exec_ns = exl3_now_ns() - start;
	if (ret->result == -EOPNOTSUPP)
		ret->detail = EXL3_DETAIL_KERNEL;
	else if (ret->result == 0)
		ret->detail = skipped;
	return gpu && ret->result == 0;
}

EXL3_API const struct exl3_mapped_ops exl3_mapped = {
	.abi = EXL3_MAPPED_ABI,
	.version = EXL3_VERSION,
	.model_open = model_open,
	.model_close = model_close,
	.find = find,
	.device = device_name,
	.lane_new = lane_new,
	.lane_free = lane_free,
	.check = check,
	.run = run,
};
