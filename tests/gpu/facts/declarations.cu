/* SPDX-License-Identifier: Apache-2.0 */
/* declarations.cu - what libexl3 declares of the driver API itself is what cuda.h says. */
#include "facts.h"

#include <stddef.h>

extern "C" {
#include "client/cuda_api.h"
}

#define SAME(ours, theirs) static_assert((int)(ours) == (int)(theirs), #ours " is not " #theirs)
SAME(EXL3_CU_ERROR_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME(EXL3_CU_POINTER_DEVICE_ORDINAL, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL);
SAME(EXL3_CU_POINTER_LEGACY_IPC, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE);
SAME(EXL3_CU_HANDLE_FD, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
SAME(EXL3_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME(EXL3_CU_ACCESS_READWRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME(EXL3_CU_HOST_PORTABLE, CU_MEMHOSTREGISTER_PORTABLE);
SAME(EXL3_CU_HOST_DEVICEMAP, CU_MEMHOSTREGISTER_DEVICEMAP);
SAME(EXL3_CU_OP_WAIT_VALUE_32, CU_STREAM_MEM_OP_WAIT_VALUE_32);
SAME(EXL3_CU_OP_WRITE_VALUE_32, CU_STREAM_MEM_OP_WRITE_VALUE_32);
SAME(EXL3_CU_WAIT_GEQ, CU_STREAM_WAIT_VALUE_GEQ);
SAME(EXL3_CU_CAPTURE_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
SAME(EXL3_CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
SAME(EXL3_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME(EXL3_CU_ERROR_NOT_READY, CUDA_ERROR_NOT_READY);

#define SIZE(ours, theirs) static_assert(sizeof(ours) == sizeof(theirs), #ours " has another size")
SIZE(exl3_cu_result, CUresult);
SIZE(exl3_cu_ptr, CUdeviceptr);
SIZE(exl3_cu_device, CUdevice);
SIZE(exl3_cu_handle, CUmemGenericAllocationHandle);
SIZE(struct exl3_cu_uuid, CUuuid);
SIZE(struct exl3_cu_ipc, CUipcMemHandle);
SIZE(struct exl3_cu_access, CUmemAccessDesc);
SIZE(union exl3_cu_mem_op, CUstreamBatchMemOpParams);

#define AT(ours, m, theirs, n) \
	static_assert(offsetof(ours, m) == offsetof(theirs, n), #ours "." #m " is elsewhere")
AT(struct exl3_cu_access, location_id, CUmemAccessDesc, location.id);
AT(struct exl3_cu_access, flags, CUmemAccessDesc, flags);
AT(union exl3_cu_mem_op, value.address, CUstreamBatchMemOpParams, waitValue.address);
AT(union exl3_cu_mem_op, value.value, CUstreamBatchMemOpParams, waitValue.value);
AT(union exl3_cu_mem_op, value.flags, CUstreamBatchMemOpParams, waitValue.flags);
AT(union exl3_cu_mem_op, value.address, CUstreamBatchMemOpParams, writeValue.address);
AT(union exl3_cu_mem_op, value.value, CUstreamBatchMemOpParams, writeValue.value);
AT(union exl3_cu_mem_op, value.flags, CUstreamBatchMemOpParams, writeValue.flags);

int main(void)
{
	void *lib = dlopen("libcuda.so.1", RTLD_NOW);
	int missing = 0;

	skip_without_gpu("declarations");
	if (!lib)
		die("dlopen libcuda.so.1: %s", dlerror());
#define LOOK(member, name, params)                          \
	if (!dlsym(lib, name)) {                            \
		printf("  the driver has no %s\n", name); \
		missing++;                                  \
	}
	EXL3_CU_FUNCTIONS(LOOK)
	fact("declarations", "the driver has every function that libexl3 looks for", !missing,
	     "%d are missing", missing);
	return facts_failed;
}
