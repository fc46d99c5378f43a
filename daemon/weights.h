/* SPDX-License-Identifier: Apache-2.0 */
/*
 * weights.h - a model on a device: matrices, modules found by name, unquantized tensors; counted.
 *
 * Life of a model:  NEW -> LOADING (loader thread) -> READY -> UNLOADING -> freed at the last put
 *                                                 \-> FAILED (error is set)
 * Tables are immutable once READY, so any thread may read them while it holds a reference.
 */
#ifndef EXL3_DAEMON_WEIGHTS_H
#define EXL3_DAEMON_WEIGHTS_H

#include "kernels/module.h"

#include <stdatomic.h>

enum exl3_model_state {
	EXL3_MODEL_NEW,
	EXL3_MODEL_LOADING,
	EXL3_MODEL_READY,
	EXL3_MODEL_FAILED,
	EXL3_MODEL_UNLOADING
};

/* A matrix by its checkpoint name, without the ".trellis". */
struct exl3_named_matrix {
	char *name;               /* owned */
	struct exl3_matrix m;     /* pointers into the model's slab */
	char *unsupported;        /* owned; reason why it was not loaded, or NULL */
	bool has_bias;            /* m.bias is set once there is a slab */
	bool placed;              /* it has room in the slab: unless it was left out before that was shared out */
	uint64_t trellis_off, suh_off, svh_off, bias_off; /* in the slab */
};

/* A module that exists in the checkpoint and cannot be served. Owned by its model, immutable. */
struct exl3_left_out {
	char *name;   /* owned */
	char *reason; /* owned */
	enum exl3_module_kind kind;
	bool follows; /* from another one that is left out, or not listed for another reason */
};

/* Where a name leads, sorted by key (see names.h) and kind. */
struct exl3_name_ref {
	char *key; /* owned */
	enum exl3_module_kind kind;
	bool left_out;
	uint32_t index; /* in modules or left_out */
};

struct exl3_tensor_desc {
	char *name;
	char dtype[8];
	uint32_t nr_dims;
	uint64_t shape[8];
	uint64_t bytes, offset; /* in tensor_fd, 64-byte aligned */
};

/* Who loads it; only its manifest tells. Set between new and load. */
struct exl3_origin {
	uint64_t instance;
	uint32_t generation;
	bool by_client;
};

struct exl3_model {
	char *name, *path, *model_type; /* owned; path: without links, if it was there at the start */
	char *asked;                    /* owned; the path as it was given, made absolute */
	_Atomic int state;              /* enum exl3_model_state */
	struct exl3_error error;        /* set before FAILED */
	char fingerprint[33];           /* 128 bits, hexadecimal; set before READY */
	_Atomic uint64_t bytes_total, bytes_loaded;
	uint64_t weight_bytes, tensor_bytes, overhead_bytes;

	const struct exl3_backend_ops *ops; /* borrowed, with dev, from the worker */
	struct exl3_dev *dev;
	struct exl3_slab *slab; /* owned */
	int tensor_fd;          /* owned; sealed read-only memfd of the unquantized tensors, or -1 */
	struct exl3_slab *tensor_slab; /* owned; a copy of them for clients, or NULL: not wanted */
	bool device_tensors;           /* wanted; set before the load */
	int manifest_fd;        /* owned; what another worker adopts it with (manifest.h), or -1 */
	struct exl3_origin origin;

	struct exl3_named_matrix *matrices; /* owned, sorted by name */
	uint32_t nr_matrices;
	struct exl3_tensor_desc *tensors;   /* owned, sorted by name */
	uint32_t nr_tensors;
	struct exl3_module_desc *modules;   /* owned, made at load: matrices, fused groups, MoE, MLP; sorted by name, kind */
	uint32_t nr_modules;
	struct exl3_left_out *left_out;     /* owned, sorted by name, kind */
	uint32_t nr_left_out;
	struct exl3_name_ref *names;        /* owned, sorted by key, kind */
	uint32_t nr_names;
	char **skipped;                     /* owned; "name: reason"; may be long: page it */
	uint32_t nr_skipped;

	_Atomic uint32_t refs;
	_Atomic bool cancel; /* asks the loader thread to stop */
	bool tied;           /* config.json ties lm_head to the embedding */
};

/**
 * exl3_model_load() - read a checkpoint directory into the device's memory. Blocks; loader thread.
 * @model: fresh from exl3_model_new(); on success READY and immutable, else FAILED with its error.
 * Errors: -EINVAL (broken checkpoint: file, tensor and reason), -ENOENT, -ENOMEM (needed and free),
 * -EOPNOTSUPP (nothing in it is EXL3), -ECANCELED.
 */
int exl3_model_load(struct exl3_model *model);

/* What exl3_model_load() left in the hands of others: borrowed descriptors, -1 for none. */
struct exl3_kept_fds {
	int manifest, slab, tensors;
	uint64_t id; /* whoever gave them knows them by this; not looked at here */
};

#define EXL3_ADOPT_VERIFY_ALL (1u << 0) /* hash everything, not samples */
#define EXL3_ADOPT_ANY_FILES  (1u << 1) /* also if the checkpoint has changed since */

/**
 * exl3_model_adopt() - instead of a load: serve weights that are in the device's memory already.
 * @model: from exl3_model_new(), or FAILED; on success READY, else NEW again with nothing in it.
 * @fds:   stay the caller's.
 * Nothing in them is trusted: seals, sizes, tables, device, driver and hashes (samples, or all) must agree.
 * Errors: -ESTALE (they are sound, but the checkpoint's files are others by now), -EBADMSG (a hash is wrong),
 * or another one with the reason why they cannot be used; then a load is what remains. Loader thread. adopt.c
 */
int exl3_model_adopt(struct exl3_model *model, const struct exl3_kept_fds *fds, unsigned flags,
		     struct exl3_error *err);

/* One reference, state NEW. @path is made absolute. */
int exl3_model_new(const char *name, const char *path, const struct exl3_backend_ops *ops,
		   struct exl3_dev *dev, struct exl3_model **ret, struct exl3_error *err);
struct exl3_model *exl3_model_get(struct exl3_model *model);
struct exl3_model *exl3_model_put(struct exl3_model *model); /* frees at the last one; NULL ok */

/**
 * exl3_model_find() - a module by name, with name variants; READY models only.
 * @trace: NULL, or called with one line for each step of the match (exl3ctl resolve).
 * Returns 0, -ENOENT (err names what is near), -EOPNOTSUPP (err has the reason it was left out).
 */
int exl3_model_find(const struct exl3_model *model, const char *name, enum exl3_module_kind kind,
		    const struct exl3_module_desc **ret,
		    void (*trace)(void *arg, const char *line), void *arg, struct exl3_error *err);
/* An unquantized tensor, with the same name variants; NULL: no such tensor. READY models only. */
const struct exl3_tensor_desc *exl3_model_find_tensor(const struct exl3_model *model,
						      const char *name);

/* A new read-only fd of the file with the unquantized tensors, for a client. -ENOENT: has none. */
int exl3_model_tensor_fd(const struct exl3_model *model, int *ret, struct exl3_error *err);

/* device_tensors.c: what the copy of so many bytes will take of the device's memory; makes it, at the end of a
 * load or an adoption (0 if none is wanted); a new fd of it for a client, and its size. */
uint64_t exl3_model_device_tensor_bytes(const struct exl3_model *model, uint64_t tensor_bytes);
int exl3_model_place_tensors(struct exl3_model *model, struct exl3_error *err);
int exl3_model_device_tensor_fd(const struct exl3_model *model, int *ret, uint64_t *bytes,
				struct exl3_error *err);

/* For adopt.c: addresses of all matrices, now that there is a slab; everything that a load made. */
void exl3_model_set_addresses(struct exl3_model *model);
void exl3_model_unload_parts(struct exl3_model *model);

#endif
