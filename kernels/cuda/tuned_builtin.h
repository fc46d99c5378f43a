/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tuned_builtin.h - made by bench/kernel_table.py; do not edit. Lines as in kernels/tuned.h, from:
 *
 * bench/results/linear_h200.csv: build/bench/kernel_cuda --csv bench/results/linear_h200.csv --shapes 0,1,2,3,4; commit e5fd6674f0f7; 2026-11-30; NVIDIA H200; HBM read 4.62 TB/s, bf16 824 TFLOP/s, tiny kernel 0.74 us
 *
 * 70 cells name the fastest entry only, not the time of the one that is taken without a table: they
 * cannot show that another one is faster, and make no line.
 */
#ifndef EXL3_CUDA_TUNED_BUILTIN_H
#define EXL3_CUDA_TUNED_BUILTIN_H

static const char exl3_tuned_builtin_sm90a[] =
	"";

#endif
