/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_state.h - what can be said about CUDA in this process without loading or starting it. */
#ifndef EXL3_SHM_CUDA_STATE_H
#define EXL3_SHM_CUDA_STATE_H

#include <stdbool.h>

/* Has somebody here started CUDA (cuInit)? From then on its environment variables are without effect. */
bool exl3_cuda_started(void);
/* Are this process's contexts on the first GPU in an MPS server? 1, 0, or -1: CUDA was not started, or its
 * driver cannot tell. (tests/gpu/facts/mps_control.cu) */
int exl3_cuda_in_mps(void);

#endif
