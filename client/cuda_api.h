/* SPDX-License-Identifier: Apache-2.0 */
/*
 * cuda_api.h - the part of the CUDA driver API that libexl3 uses, opened at run time.
 *
 * Declared here, so that the library is built and installed on machines without CUDA; the layouts are those
 * of cuda.h and do not change (tests/gpu/facts/declarations.cu compares them where there is one).
 */
#ifndef EXL3_CLIENT_CUDA_API_H
#define EXL3_CLIENT_CUDA_API_H

#include <stddef.h>
#include <stdint.h>

typedef int exl3_cu_result; /* 0 is success */
typedef uint64_t exl3_cu_ptr;
typedef int exl3_cu_device;
typedef uint64_t exl3_cu_handle; /* CUmemGenericAllocationHandle */

enum {
	EXL3_CU_ERROR_OUT_OF_MEMORY = 2,
	EXL3_CU_POINTER_DEVICE_ORDINAL = 9,
	EXL3_CU_POINTER_LEGACY_IPC = 10, /* IS_LEGACY_CUDA_IPC_CAPABLE */
	EXL3_CU_HANDLE_FD = 1,           /* CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR */
	EXL3_CU_LOCATION_DEVICE = 1,
	EXL3_CU_ACCESS_READWRITE = 3,
	EXL3_CU_HOST_PORTABLE = 1,
	EXL3_CU_HOST_DEVICEMAP = 2,
	EXL3_CU_OP_WAIT_VALUE_32 = 1,
	EXL3_CU_OP_WRITE_VALUE_32 = 2,
	EXL3_CU_WAIT_GEQ = 0,
	EXL3_CU_CAPTURE_NONE = 0,
	EXL3_CU_CAPTURE_MODE_RELAXED = 2,
	EXL3_CU_STREAM_NON_BLOCKING = 1,
	EXL3_CU_ERROR_NOT_READY = 600,
};

struct exl3_cu_uuid {
	unsigned char bytes[16];
};

struct exl3_cu_ipc {
	char reserved[64];
};

struct exl3_cu_access {
	int location_type, location_id;
	int flags;
};

/* CUstreamBatchMemOpParams; of its members those that write or wait for a value. */
union exl3_cu_mem_op {
	int operation;
	struct {
		int operation;
		exl3_cu_ptr address;
		union {
			uint32_t value;
			uint64_t value64;
		};
		unsigned flags;
		exl3_cu_ptr alias;
	} value;
	uint64_t pad[6];
};

/* X(member, name in the library, parameters) */
#define EXL3_CU_FUNCTIONS(X)                                                                              \
	X(init, "cuInit", (unsigned flags))                                                               \
	X(error_string, "cuGetErrorString", (exl3_cu_result r, const char **text))                        \
	X(ctx_get_current, "cuCtxGetCurrent", (void **ctx))                                               \
	X(ctx_set_current, "cuCtxSetCurrent", (void *ctx))                                                \
	X(ctx_get_device, "cuCtxGetDevice", (exl3_cu_device *dev))                                        \
	X(ctx_synchronize, "cuCtxSynchronize", (void))                                                    \
	X(device_get, "cuDeviceGet", (exl3_cu_device *dev, int ordinal))                                  \
	X(device_get_uuid, "cuDeviceGetUuid", (struct exl3_cu_uuid *uuid, exl3_cu_device dev))            \
	X(pointer_attribute, "cuPointerGetAttribute", (void *data, int attribute, exl3_cu_ptr ptr))       \
	X(address_range, "cuMemGetAddressRange_v2", (exl3_cu_ptr *base, size_t *bytes, exl3_cu_ptr ptr))  \
	X(ipc_get, "cuIpcGetMemHandle", (struct exl3_cu_ipc *handle, exl3_cu_ptr ptr))                    \
	X(retain, "cuMemRetainAllocationHandle", (exl3_cu_handle *handle, void *ptr))                     \
	X(release, "cuMemRelease", (exl3_cu_handle handle))                                               \
	X(export_handle, "cuMemExportToShareableHandle",                                                  \
	  (void *fd, exl3_cu_handle handle, int type, unsigned long long flags))                          \
	X(import_handle, "cuMemImportFromShareableHandle", (exl3_cu_handle *handle, void *fd, int type))  \
	X(reserve, "cuMemAddressReserve",                                                                 \
	  (exl3_cu_ptr *ptr, size_t bytes, size_t align, exl3_cu_ptr at, unsigned long long flags))       \
	X(unreserve, "cuMemAddressFree", (exl3_cu_ptr ptr, size_t bytes))                                 \
	X(map, "cuMemMap",                                                                                \
	  (exl3_cu_ptr ptr, size_t bytes, size_t offset, exl3_cu_handle handle, unsigned long long flags)) \
	X(unmap, "cuMemUnmap", (exl3_cu_ptr ptr, size_t bytes))                                           \
	X(set_access, "cuMemSetAccess",                                                                   \
	  (exl3_cu_ptr ptr, size_t bytes, const struct exl3_cu_access *access, size_t nr))                \
	X(host_register, "cuMemHostRegister_v2", (void *ptr, size_t bytes, unsigned flags))               \
	X(host_unregister, "cuMemHostUnregister", (void *ptr))                                            \
	X(host_device_pointer, "cuMemHostGetDevicePointer_v2",                                            \
	  (exl3_cu_ptr *ret, void *ptr, unsigned flags))                                                  \
	X(stream_mem_ops, "cuStreamBatchMemOp_v2",                                                        \
	  (void *stream, unsigned nr, union exl3_cu_mem_op *ops, unsigned flags))                         \
	X(stream_capturing, "cuStreamIsCapturing", (void *stream, int *status))                           \
	X(primary_retain, "cuDevicePrimaryCtxRetain", (void **ctx, exl3_cu_device dev))                   \
	X(primary_release, "cuDevicePrimaryCtxRelease_v2", (exl3_cu_device dev))                          \
	X(stream_create, "cuStreamCreate", (void **stream, unsigned flags))                               \
	X(stream_destroy, "cuStreamDestroy_v2", (void *stream))                                           \
	X(stream_synchronize, "cuStreamSynchronize", (void *stream))                                      \
	X(stream_query, "cuStreamQuery", (void *stream))                                                  \
	X(launch_host, "cuLaunchHostFunc", (void *stream, void (*fn)(void *arg), void *arg))              \
	X(exchange_capture_mode, "cuThreadExchangeStreamCaptureMode", (int *mode))

struct exl3_cuda {
#define EXL3_CU_MEMBER(member, name, params) exl3_cu_result(*member) params;
	EXL3_CU_FUNCTIONS(EXL3_CU_MEMBER)
#undef EXL3_CU_MEMBER
};

#endif
