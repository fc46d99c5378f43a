/* SPDX-License-Identifier: Apache-2.0 */
/* weights.c - a model's life: load a checkpoint onto a device, find modules in it, free it. */
#include "daemon/weights.h"

#include "daemon/fault.h"
#include "daemon/intake.h"
#include "daemon/loader.h"
#include "daemon/log.h"
#include "daemon/manifest.h"
#include "daemon/modules.h"
#include "daemon/plan.h"
#include "shm/segment.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* ---- life ---- */

/* Owned by the caller, or NULL. */
static char *absolute(const char *path)
{
	char *cwd, *joined = NULL;

	if (path[0] == '/')
		return strdup(path);
	cwd = getcwd(NULL, 0);
	if (cwd && asprintf(&joined, "%s/%s", cwd, path) < 0)
		joined = NULL;
	free(cwd);
	return joined;
}

int exl3_model_new(const char *name, const char *path, const struct exl3_backend_ops *ops,
		   struct exl3_dev *dev, struct exl3_model **ret, struct exl3_error *err)
{
	struct exl3_model *m;

	if (!*name || strlen(name) > EXL3_NAME_MAX)
		return exl3_errf(err, -EINVAL, "a model's name has 1 to %u bytes", EXL3_NAME_MAX);
	m = calloc(1, sizeof(*m));
	if (!m)
		return exl3_errf(err, -ENOMEM, "out of memory");
	m->tensor_fd = m->manifest_fd = -1;
	m->ops = ops;
	m->dev = dev;
	atomic_store(&m->refs, 1);
	atomic_store(&m->state, EXL3_MODEL_NEW);
	m->name = strdup(name);
	m->asked = absolute(path);
	m->path = realpath(path, NULL); /* for listings; the directory itself may come later */
	if (!m->path)
		m->path = absolute(path);
	m->model_type = strdup("");
	if (!m->name || !m->path || !m->asked || !m->model_type) {
		exl3_model_put(m);
		return exl3_errf(err, -ENOMEM, "out of memory");
	}
	*ret = m;
	return 0;
}

struct exl3_model *exl3_model_get(struct exl3_model *m)
{
	atomic_fetch_add_explicit(&m->refs, 1, memory_order_relaxed);
	return m;
}

/* Everything that a load made; what is left is a model that FAILED or goes away. */
void exl3_model_unload_parts(struct exl3_model *m)
{
	exl3_modules_fini(m);
	exl3_matrices_fini(m->matrices, m->nr_matrices);
	exl3_tensors_fini(m->tensors, m->nr_tensors);
	free(m->matrices);
	free(m->tensors);
	m->matrices = NULL;
	m->tensors = NULL;
	m->nr_matrices = m->nr_tensors = 0;
	m->weight_bytes = m->tensor_bytes = m->overhead_bytes = 0;
	if (m->slab)
		m->slab = m->ops->slab_free(m->slab);
	if (m->tensor_slab)
		m->tensor_slab = m->ops->slab_free(m->tensor_slab);
	exl3_closep(&m->tensor_fd);
	exl3_closep(&m->manifest_fd);
}

struct exl3_model *exl3_model_put(struct exl3_model *m)
{
	if (!m || atomic_fetch_sub_explicit(&m->refs, 1, memory_order_acq_rel) != 1)
		return NULL;
	exl3_model_unload_parts(m);
	free(m->name);
	free(m->path);
	free(m->asked);
	free(m->model_type);
	free(m);
	return NULL;
}

/* ---- loading ---- */

/* Nothing has been moved yet: refuse what cannot fit, with both figures. */
static int check_device_memory(const struct exl3_model *m, uint64_t need, struct exl3_error *err)
{
	struct exl3_dev_info info = {0};

	m->ops->info(m->dev, &info);
	if (need <= info.memory_free)
		return 0;
	return exl3_errf(err, -ENOMEM,
			 "needs %" PRIu64 " bytes for weights, the device has %" PRIu64
			 " of %" PRIu64 " free (models hold %" PRIu64 ", arenas %" PRIu64 ")",
			 need, info.memory_free, info.memory_total, info.slab_bytes,
			 info.arena_bytes);
}

/* After the slab, which may be of the same memory. */
static int check_host_memory(uint64_t need, struct exl3_error *err)
{
	uint64_t available = exl3_memory_available();

	if (need <= available)
		return 0;
	return exl3_errf(err, -ENOMEM,
			 "needs %" PRIu64 " bytes for unquantized tensors, the machine has %" PRIu64
			 " available",
			 need, available);
}

static int tensor_file_new(uint64_t bytes, int *ret, struct exl3_error *err)
{
	exl3_auto(exl3_closep) int fd = -1;

	if (!bytes)
		return 0; /* none to keep */
	errno = ENOMEM;   /* for the injected failure */
	if (!exl3_fault("weights.tensors"))
		fd = memfd_create("exl3-tensors", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	if (fd < 0)
		return exl3_errf(err, -errno, "memfd_create for unquantized tensors: %m");
	if (ftruncate(fd, (off_t)bytes) < 0)
		return exl3_errf(err, -errno,
				 "memfd of %" PRIu64 " bytes for unquantized tensors: %m", bytes);
	*ret = exl3_take_fd(&fd);
	return 0;
}

static int tensor_file_seal(int fd, struct exl3_error *err)
{
	int seals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE | F_SEAL_SEAL;

	if (fd >= 0 && fcntl(fd, F_ADD_SEALS, seals) < 0)
		return exl3_errf(err, -errno, "sealing the unquantized tensors: %m");
	return 0;
}

/* Streams the files into slab and tensor file. */
static int take_in(struct exl3_model *m, struct exl3_plan *plan, struct exl3_error *err)
{
	struct exl3_intake *in;
	struct exl3_loader loader = {
		.ckpt = plan->ckpt,
		.data = exl3_intake_data,
		.sync = exl3_intake_sync,
		.buffer_new = exl3_intake_buffer_new,
		.buffer_free = exl3_intake_buffer_free,
		.cancel = &m->cancel,
		.loaded = &m->bytes_loaded,
	};
	int rc;

	rc = exl3_intake_new(plan, m->ops, m->dev, m->slab, m->tensor_fd, &in, err);
	if (rc < 0)
		return rc;
	loader.arg = in;
	rc = exl3_loader_run(&loader, err);
	if (rc == 0)
		exl3_intake_fingerprint(in, m->fingerprint);
	exl3_intake_free(in);
	return rc;
}

/* Where things are, now that there is a slab. */
void exl3_model_set_addresses(struct exl3_model *m)
{
	const char *base = m->slab->ptr;

	for (uint32_t i = 0; i < m->nr_matrices; i++) {
		struct exl3_named_matrix *mat = &m->matrices[i];

		if (!mat->placed)
			continue;
		mat->m.trellis = base + mat->trellis_off;
		mat->m.suh = base + mat->suh_off;
		mat->m.svh = base + mat->svh_off;
		mat->m.bias = mat->has_bias ? base + mat->bias_off : NULL;
	}
}

/* Without one it serves all the same: a later worker has to load it again, that is all. */
static void write_manifest(struct exl3_model *m, const struct exl3_plan *plan)
{
	struct exl3_manifest man = {
		.head = {.nr_slabs = 1,
			 .instance = m->origin.instance,
			 .generation = m->origin.generation,
			 .flags = (m->origin.by_client ? EXL3_MANIFEST_BY_CLIENT : 0) |
				  (m->device_tensors ? EXL3_MANIFEST_DEVICE_TENSORS : 0)},
		.path = m->path,
		.data_bytes = plan->ckpt->data_bytes,
		.config = plan->ckpt->config,
		.matrices = m->matrices,
		.nr_matrices = m->nr_matrices,
		.tensors = m->tensors,
		.nr_tensors = m->nr_tensors,
		.strays = plan->strays,
		.nr_strays = plan->nr_strays,
		.pieces = plan->pieces,
		.layout = plan->layout,
	};
	struct exl3_dev_info info = {0};
	struct exl3_error err;
	int rc;

	if (m->slab->fd < 0)
		return; /* nobody else could map it */
	m->ops->info(m->dev, &info);
	snprintf(man.head.name, sizeof(man.head.name), "%s", m->name);
	snprintf(man.head.path, sizeof(man.head.path), "%s", m->asked);
	snprintf(man.head.device, sizeof(man.head.device), "%s", info.uuid);
	snprintf(man.driver, sizeof(man.driver), "%s", info.driver);
	snprintf(man.backend, sizeof(man.backend), "%s", m->ops->name);
	snprintf(man.fingerprint, sizeof(man.fingerprint), "%s", m->fingerprint);
	rc = exl3_manifest_list_files(plan->ckpt, m->path, &man.files, &man.nr_files, &err);
	if (rc == 0) {
		rc = exl3_fault("weights.manifest")
			     ? exl3_errf(&err, -ENOMEM, "manifest (fault injection)")
			     : exl3_manifest_write(&man, &m->manifest_fd, &err);
		exl3_manifest_files_fini(man.files, man.nr_files);
	}
	if (rc < 0)
		exl3_warn("model %s: another worker will have to load it again: %s", m->name,
			  err.text);
}

static int load_plan(struct exl3_model *m, const struct exl3_modelconf *conf,
		     struct exl3_plan *plan, struct exl3_error *err)
{
	uint64_t copies = exl3_model_device_tensor_bytes(m, plan->layout.tensor_bytes);
	int rc = check_device_memory(m, plan->layout.slab_bytes + copies, err);

	if (rc == 0 && exl3_fault("weights.slab"))
		rc = exl3_errf(err, -ENOMEM, "no memory for weights (fault injection)");
	/* A checkpoint of which nothing is supported still has a (tiny) slab. */
	if (rc == 0)
		rc = m->ops->slab_new(m->dev, plan->layout.slab_bytes ? plan->layout.slab_bytes : EXL3_SLAB_ALIGN,
				      &m->slab, err);
	if (rc == 0)
		rc = check_host_memory(plan->layout.tensor_bytes, err);
	if (rc == 0)
		rc = tensor_file_new(plan->layout.tensor_bytes, &m->tensor_fd, err);
	if (rc == 0)
		rc = take_in(m, plan, err);
	if (rc == 0)
		rc = tensor_file_seal(m->tensor_fd, err);
	if (rc == 0 && m->ops->slab_seal)
		rc = m->ops->slab_seal(m->slab, err);
	if (rc < 0)
		return rc;
	m->weight_bytes = plan->layout.weight_bytes;
	m->tensor_bytes = plan->layout.tensor_bytes;
	rc = exl3_model_place_tensors(m, err);
	if (rc < 0)
		return rc;
	m->overhead_bytes = m->slab->bytes - plan->layout.weight_bytes;
	m->matrices = exl3_take_ptr(&plan->matrices);
	m->nr_matrices = plan->nr_matrices;
	m->tensors = exl3_take_ptr(&plan->tensors);
	m->nr_tensors = plan->nr_tensors;
	plan->nr_matrices = plan->nr_tensors = 0;
	exl3_model_set_addresses(m);
	write_manifest(m, plan);
	return exl3_modules_make(m, conf, plan->strays, plan->nr_strays, err);
}

static int load_checkpoint(struct exl3_model *m, const struct exl3_ckpt *ckpt,
			   struct exl3_error *err)
{
	struct exl3_modelconf conf;
	struct exl3_plan plan = {0};
	char *type;
	int rc;

	exl3_modelconf_init(&conf, ckpt->config);
	type = strdup(conf.model_type);
	if (!type)
		return exl3_errf(err, -ENOMEM, "out of memory");
	free(m->model_type);
	m->model_type = type;
	m->tied = conf.tied;
	rc = exl3_plan_make(ckpt, &conf, &plan, err);
	if (rc < 0)
		return rc;
	atomic_store(&m->bytes_total, ckpt->data_bytes);
	rc = load_plan(m, &conf, &plan, err);
	exl3_plan_fini(&plan);
	return rc;
}

int exl3_model_load(struct exl3_model *m)
{
	struct exl3_ckpt ckpt;
	struct exl3_error err = {0};
	int rc;

	atomic_store(&m->state, EXL3_MODEL_LOADING);
	rc = exl3_ckpt_open(m->path, &ckpt, &err);
	if (rc == 0) {
		rc = load_checkpoint(m, &ckpt, &err);
		exl3_ckpt_fini(&ckpt);
		if (rc < 0)
			exl3_err_prefix(&err, "%.200s", m->path);
	}
	if (rc < 0) {
		exl3_model_unload_parts(m);
		err.code = rc;
		m->error = err;
		atomic_store_explicit(&m->state, EXL3_MODEL_FAILED, memory_order_release);
		return rc;
	}
	atomic_store_explicit(&m->state, EXL3_MODEL_READY, memory_order_release);
	return 0;
}

int exl3_model_tensor_fd(const struct exl3_model *m, int *ret, struct exl3_error *err)
{
	char path[64];
	int fd;

	if (m->tensor_fd < 0)
		return exl3_errf(err, -ENOENT, "model '%.100s' has no unquantized tensors",
				 m->name);
	snprintf(path, sizeof(path), "/proc/self/fd/%d", m->tensor_fd);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	/* Without /proc: the seals keep anyone from writing through a copy of ours. */
	if (fd < 0)
		fd = fcntl(m->tensor_fd, F_DUPFD_CLOEXEC, 3);
	if (fd < 0)
		return exl3_errf(err, -errno, "model '%.100s': fd of its tensors: %m", m->name);
	*ret = fd;
	return 0;
}
