# SPDX-License-Identifier: Apache-2.0
# Makefile - everything is built, tested and installed from here; `make help` lists what there is.

VERSION := 0.1.0
SAN     ?=
BUILD   ?= build$(if $(SAN),-$(firstword $(subst $(comma), ,$(SAN))))
WERROR  ?= 1
V       ?= 0
comma   := ,

DESTDIR ?=
PREFIX  ?= /usr/local
LIBDIR  ?= $(PREFIX)/lib
UNITDIR ?= $(PREFIX)/lib/systemd/system
SYSUSERSDIR ?= $(PREFIX)/lib/sysusers.d
TMPFILESDIR ?= $(PREFIX)/lib/tmpfiles.d
SYSCONFDIR  ?= /etc
DOCDIR       = $(PREFIX)/share/doc/exl3-daemon

CC     ?= gcc
CLANG  ?= clang
PYTHON ?= /usr/bin/python3
NVCC   ?= $(or $(shell command -v nvcc 2>/dev/null),$(wildcard /usr/local/cuda/bin/nvcc))
CUDA_ARCHS ?= 90a
Q      := $(if $(filter 0,$(V)),@,)
say     = $(if $(filter 0,$(V)),@printf '  %-7s %s\n' $(1) $(2))

# ---- what this machine has -------------------------------------------------------------------
# Names as pkg-config knows them. The packages of a Debian machine stand in tests/deps.sh.
PKGS_DAEMON := liburing libprotobuf-c numa inih libcjson libsystemd libxxhash
PKGS_CLIENT := libprotobuf-c
PKGS_CTL    := libcjson
PKGS_TEST   := cmocka
PKGS        := $(sort $(PKGS_DAEMON) $(PKGS_CTL))
MISSING     := $(strip $(foreach p,$(PKGS),$(if $(shell pkg-config --exists $(p) 2>/dev/null && echo y),,$(p))))
pkg_cflags   = $(shell pkg-config --cflags $(1) 2>/dev/null)
pkg_libs     = $(shell pkg-config --libs $(1) 2>/dev/null)

# ---- flags -----------------------------------------------------------------------------------
WARN := -Wall -Wextra -Wshadow -Wstrict-prototypes -Wmissing-prototypes -Wvla -Wundef -Wformat=2 \
	$(if $(filter 1,$(WERROR)),-Werror)
SANFLAGS := $(if $(SAN),-fsanitize=$(SAN) -fno-omit-frame-pointer $(if $(findstring undefined,$(SAN)),-fno-sanitize-recover=undefined))
HARDEN   := $(if $(SAN),,-U_FORTIFY_SOURCE -D_FORTIFY_SOURCE=3)
CFLAGS   ?= -O2 -g
# The same bits whatever the folder: names in the objects are relative to the tree.
ALL_CFLAGS := -std=c11 -D_GNU_SOURCE $(CFLAGS) $(WARN) -ffile-prefix-map=$(CURDIR)=. -fno-common -fvisibility=hidden \
	-fstack-protector-strong -fPIC -fopenmp-simd $(HARDEN) $(SANFLAGS) -I. -Iclient -I$(BUILD)/gen \
	-DEXL3_DAEMON_VERSION='"$(VERSION)"'
ALL_LDFLAGS := $(LDFLAGS) $(SANFLAGS) -Wl,-z,relro,-z,now
NVCCFLAGS ?= -O3
# On sm_80, 86, 89, 100 and 120 the portable kernels run; the Hopper ones are compiled for 90a only.
cuda_gencode = -gencode arch=compute_$(1),code=sm_$(1)
ALL_NVCCFLAGS := -std=c++17 $(NVCCFLAGS) -lineinfo $(if $(filter 1,$(WERROR)),-Werror all-warnings) -I. \
	$(foreach a,$(CUDA_ARCHS),$(call cuda_gencode,$(a))) -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Wno-unknown-pragmas \
	-cudart static

# ---- sources ---------------------------------------------------------------------------------
GEN        := $(BUILD)/gen/proto/exl3.pb-c.c
SHM_SRC    := $(wildcard shm/*.c)
PROTO_SRC  := $(wildcard proto/*.c)
KERNEL_SRC := $(wildcard kernels/*.c kernels/cpu/*.c)
DAEMON_SRC := $(filter-out daemon/main.c,$(wildcard daemon/*.c))
CTL_SRC    := $(wildcard client/exl3ctl*.c client/npy.c)
CLIENT_SRC := $(filter-out $(CTL_SRC),$(wildcard client/*.c))
EXAMPLE_COMMON := $(wildcard client/examples/common_*.c)
EXAMPLES   := $(filter-out $(EXAMPLE_COMMON),$(wildcard client/examples/*.c))
UNIT       := $(wildcard tests/unit/test_*.c)
UNIT_COMMON := $(filter-out $(UNIT),$(wildcard tests/unit/*.c)) $(wildcard tests/sim/*.c)
STRESS     := $(wildcard tests/stress/*.c)
CHECKKERNEL := $(wildcard tests/checkkernel/*.c)
FUZZ       := $(wildcard tests/fuzz/fuzz_*.c)
HELPERS    := $(wildcard tests/integration/*.c tests/fault/*.c)
BENCH      := $(wildcard bench/*.c)
CUDA_SRC   := $(wildcard kernels/cuda/*.cu kernels/cuda/inst/*.cu)
GPU_TESTS  := $(wildcard tests/gpu/check_*.cu)
GPU_FACTS  := $(wildcard tests/gpu/facts/*.cu tests/gpu/facts/*.c)
GPU_BENCH  := $(wildcard bench/*.cu)

obj = $(patsubst %.c,$(BUILD)/obj/%.o,$(1))
LIB_OBJ    := $(call obj,$(SHM_SRC) $(PROTO_SRC)) $(BUILD)/obj/gen/exl3.pb-c.o
KERNEL_OBJ := $(call obj,$(KERNEL_SRC))
DAEMON_OBJ := $(call obj,$(DAEMON_SRC))
CLIENT_OBJ := $(call obj,$(CLIENT_SRC))
MAPPED_OBJ := $(call obj,$(wildcard client/mapped/*.c) $(KERNEL_SRC) $(SHM_SRC))
CTL_OBJ    := $(call obj,$(CTL_SRC))
CUDA_OBJ   := $(patsubst %.cu,$(BUILD)/obj/%.cu.o,$(CUDA_SRC))

DAEMON_LIBS := $(call pkg_libs,$(PKGS_DAEMON)) -lnuma -ldl -lm -lgomp -lpthread
CLIENT_LIBS := $(call pkg_libs,$(PKGS_CLIENT)) -ldl -lpthread

PROGRAMS := $(BUILD)/exl3-daemon $(BUILD)/exl3ctl $(BUILD)/libexl3.so $(BUILD)/libexl3.a $(BUILD)/libexl3-mapped.so \
	$(EXAMPLES:client/examples/%.c=$(BUILD)/examples/%)

.DEFAULT_GOAL := all
.SECONDARY:
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules

all: probe $(PROGRAMS) ## everything that runs without a GPU
.PHONY: all

probe:
	@$(if $(MISSING),echo "missing: $(MISSING); 'make deps' installs it" >&2; exit 1,:)
.PHONY: probe

# ---- rules -----------------------------------------------------------------------------------
# Objects depend on a file that holds their flags, so a changed flag rebuilds them.
$(BUILD)/flags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(CC) $(subst ','\'',$(ALL_CFLAGS)) $(ALL_LDFLAGS)' | cmp -s - $@ || \
		printf '%s\n' '$(CC) $(subst ','\'',$(ALL_CFLAGS)) $(ALL_LDFLAGS)' > $@
$(BUILD)/nvflags: FORCE
	@mkdir -p $(@D)
	@printf '%s\n' '$(NVCC) $(ALL_NVCCFLAGS)' | cmp -s - $@ || printf '%s\n' '$(NVCC) $(ALL_NVCCFLAGS)' > $@
FORCE:
.PHONY: FORCE

$(GEN): proto/exl3.proto
	$(call say,PROTOC,$<)
	@mkdir -p $(BUILD)/gen
	$(Q)protoc-c --proto_path=. --c_out=$(BUILD)/gen $<
$(BUILD)/gen/proto/exl3.pb-c.h: $(GEN)

$(BUILD)/obj/gen/exl3.pb-c.o: $(GEN) $(BUILD)/flags
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(filter-out -W%,$(ALL_CFLAGS)) -Wno-all -c -o $@ $<

%_avx2.o: ISA := -mavx2 -mfma -mf16c -mbmi2
%_avx512.o: ISA := -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx2 -mfma -mf16c -mbmi2
OPENMP := $(if $(findstring clang,$(CC)),,-fopenmp) # the fuzz targets need no team, and libomp may be missing
$(BUILD)/obj/kernels/cpu/%.o: OPT := -O3 $(OPENMP)
ifneq ($(SAN),)
# Dozens of unrolled decoders: at -O3 and with a check at every shift they take minutes to compile.
$(BUILD)/obj/kernels/cpu/%_avx2.o $(BUILD)/obj/kernels/cpu/%_avx512.o: OPT := -O1 $(OPENMP) \
	-fno-sanitize=alignment,shift,bounds,null,object-size,pointer-overflow
endif
$(BUILD)/obj/kernels/cpu/ref.o: OPT := -O2
$(BUILD)/obj/client/exl3ctl%.o $(BUILD)/obj/client/npy.o: OPT :=
$(BUILD)/obj/daemon/config%.o: OPT := -DEXL3_SYSCONFDIR='"$(SYSCONFDIR)"'

$(BUILD)/obj/%.o: %.c $(BUILD)/flags | $(GEN)
	$(call say,CC,$<)
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_CFLAGS) $(OPT) $(ISA) $(call pkg_cflags,$(PKGS)) -MMD -MP -c -o $@ $<

$(BUILD)/obj/%.cu.o: %.cu $(BUILD)/nvflags
	$(call say,NVCC,$<)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -MMD -MP -MF $(@:.o=.d) -c -o $@ $<

# Internal archives: what the daemon, the tests and the bench link. libexl3 is the public one.
$(BUILD)/libshm.a: $(LIB_OBJ)
$(BUILD)/libkernels.a: $(KERNEL_OBJ)
$(BUILD)/libdaemon.a: $(DAEMON_OBJ)
$(BUILD)/libexl3.a: $(CLIENT_OBJ) $(LIB_OBJ)
$(BUILD)/libctl.a: $(call obj,$(wildcard client/npy.c))
$(BUILD)/%.a:
	$(call say,AR,$@)
	@mkdir -p $(@D)
	$(Q)rm -f $@ && ar rcs $@ $^

$(BUILD)/libexl3.so: $(CLIENT_OBJ) $(LIB_OBJ) client/libexl3.map
	$(call say,LD,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -shared -Wl,-soname,libexl3.so.0 -Wl,--version-script=client/libexl3.map \
		$(if $(SAN),,-Wl,--no-undefined) -o $@ $(CLIENT_OBJ) $(LIB_OBJ) $(CLIENT_LIBS)
	$(Q)ln -sf libexl3.so $(BUILD)/libexl3.so.0

# The kernels for mapped mode: libexl3 opens it when a client maps weights first, and links nothing of it.
$(BUILD)/libexl3-mapped.so: $(MAPPED_OBJ)
	$(call say,LD,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -shared $(if $(SAN),,-Wl,--no-undefined) -Wl,-Bsymbolic -o $@ $^ -lnuma -ldl -lm -lgomp -lpthread

DAEMON_PARTS := $(BUILD)/libdaemon.a $(BUILD)/libkernels.a $(BUILD)/libshm.a
$(BUILD)/exl3-daemon: $(BUILD)/obj/daemon/main.o $(DAEMON_PARTS)
	$(call say,LD,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -pie -rdynamic -o $@ $(BUILD)/obj/daemon/main.o \
		-Wl,--start-group $(DAEMON_PARTS) -Wl,--end-group $(DAEMON_LIBS)

$(BUILD)/exl3ctl: $(CTL_OBJ) $(BUILD)/libexl3.a
	$(call say,LD,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -pie -o $@ $^ $(CLIENT_LIBS) $(call pkg_libs,$(PKGS_CTL)) -lm

$(BUILD)/examples/%: $(BUILD)/obj/client/examples/%.o $(call obj,$(EXAMPLE_COMMON)) $(BUILD)/libexl3.a
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_LDFLAGS) -pie -o $@ $^ $(CLIENT_LIBS) -lcjson -lm

# Tests and benchmarks may link everything; archives give them what they use.
TEST_PARTS := $(DAEMON_PARTS) $(BUILD)/libexl3.a $(BUILD)/libctl.a
define test_link
	$(call say,LD,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(ALL_LDFLAGS) -o $@ $(filter %.o,$^) -Wl,--start-group $(TEST_PARTS) -Wl,--end-group \
		$(1) $(DAEMON_LIBS)
endef
$(BUILD)/tests/unit/%: $(BUILD)/obj/tests/unit/%.o $(call obj,$(UNIT_COMMON)) $(TEST_PARTS)
	$(call test_link,$(call pkg_libs,$(PKGS_TEST)))
$(BUILD)/tests/checkkernel/checkkernel: $(call obj,$(CHECKKERNEL)) $(TEST_PARTS)
	$(call test_link)
# By folder: a rule for all of tests/ would win over that for tests/unit where its object exists already.
define test_folder
$(BUILD)/tests/$(1)/%: $(BUILD)/obj/tests/$(1)/%.o $(TEST_PARTS)
	$$(call test_link)
endef
$(foreach d,stress integration fault,$(eval $(call test_folder,$(d))))
$(BUILD)/tests/libexhaust.so: $(BUILD)/obj/tests/preload/exhaust.o
	$(call say,LD,$@)
	$(Q)$(CC) $(ALL_LDFLAGS) -shared -o $@ $<
$(BUILD)/bench/serving: $(call obj,$(wildcard bench/serving/*.c))
$(BUILD)/bench/rpc_stream: $(call obj,$(wildcard bench/rpc_stream/*.c))
$(BUILD)/bench/sched_sim: $(call obj,$(wildcard tests/sim/*.c))
# OpenBLAS is measured against, never used.
$(BUILD)/bench/%: $(BUILD)/obj/bench/%.o $(TEST_PARTS)
	$(call test_link,$(if $(filter %kernel_cpu,$@),-lopenblas))

# CUDA kernels by family, so that a test or benchmark of one needs only that one compiled.
cuda_family = $(patsubst %.cu,$(BUILD)/obj/%.cu.o,$(foreach f,$(1),$(wildcard kernels/cuda/$(f)*.cu kernels/cuda/inst/$(f)*.cu)))
$(BUILD)/libcuda_linear.a: $(call cuda_family,gemv gemm)
$(BUILD)/libcuda_mla.a: $(call cuda_family,mla)
$(BUILD)/libcuda_moe.a: $(call cuda_family,moe)
$(BUILD)/libcuda_backend.a: $(call cuda_family,backend import memory lower track plan)
CUDA_HOST_OBJ := $(call obj,shm/util.c kernels/executor.c kernels/tuned.c)
CUDA_LINEAR := $(BUILD)/libcuda_linear.a
CUDA_ALL := $(BUILD)/libcuda_backend.a $(BUILD)/libcuda_moe.a $(BUILD)/libcuda_mla.a $(CUDA_LINEAR)

# The backend is a plugin: the daemon's binary is the same with and without it.
$(BUILD)/exl3-cuda.so: $(CUDA_ALL) $(CUDA_HOST_OBJ)
	$(call say,NVCC,$@)
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -shared -o $@ -Xlinker --whole-archive,$(BUILD)/libcuda_backend.a,--no-whole-archive \
		$(filter-out $(BUILD)/libcuda_backend.a,$(CUDA_ALL)) $(CUDA_HOST_OBJ) -Xlinker --no-undefined -ldl -lpthread

# For clients with CUDA: one small kernel, for every architecture that this nvcc knows.
GPU_LIB := $(BUILD)/libexl3-gpu.so
$(GPU_LIB): client/cuda/gpu.cu client/cuda/exl3_gpu.h client/cuda/exl3_device.cuh $(BUILD)/nvflags
	$(call say,NVCC,$@)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(filter-out -gencode arch=%,$(ALL_NVCCFLAGS)) -arch=all-major -shared -o $@ -Xlinker -soname=libexl3-gpu.so.0 $<
	$(Q)ln -sf libexl3-gpu.so $(BUILD)/libexl3-gpu.so.0

define gpu_link
	$(call say,NVCC,$@)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -MMD -MP -MF $(BUILD)/obj/$(notdir $@).gpu.d -o $@ $< $(filter %.a %.o,$^) -ldl
endef
$(BUILD)/tests/gpu/check_mla: tests/gpu/check_mla.cu $(BUILD)/libcuda_mla.a $(CUDA_HOST_OBJ) $(BUILD)/nvflags
	$(call gpu_link)
$(BUILD)/tests/gpu/check_moe: tests/gpu/check_moe.cu $(BUILD)/libcuda_moe.a $(BUILD)/obj/kernels/cpu/ref.o $(CUDA_HOST_OBJ) $(BUILD)/nvflags
	$(call gpu_link)
# These have the backend from its plugin, and libexl3-gpu's source.
PLAN_GPU := client/cuda/gpu.cu tests/gpu/plan_rig.h client/cuda/exl3_device.cuh client/cuda/exl3_gpu.h kernels/backend.h $(BUILD)/nvflags
define plan_link
	$(call say,NVCC,$@)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -o $@ $(filter %.cu,$^) -ldl -lpthread
endef
$(BUILD)/tests/gpu/check_plan: tests/gpu/check_plan.cu $(PLAN_GPU)
	$(call plan_link)
$(BUILD)/bench/plan_cuda: bench/plan_cuda.cu $(PLAN_GPU)
	$(call plan_link)
$(BUILD)/tests/gpu/check_%: tests/gpu/check_%.cu $(CUDA_LINEAR) $(CUDA_HOST_OBJ) $(BUILD)/nvflags
	$(call gpu_link)
$(BUILD)/bench/mla_cuda: bench/mla_cuda.cu $(BUILD)/libcuda_mla.a $(CUDA_HOST_OBJ) $(BUILD)/nvflags
	$(call gpu_link)
$(BUILD)/bench/moe_cuda: bench/moe_cuda.cu $(BUILD)/libcuda_moe.a $(CUDA_HOST_OBJ) $(BUILD)/nvflags
	$(call gpu_link)
$(BUILD)/bench/%_cuda: bench/%_cuda.cu $(CUDA_LINEAR) $(CUDA_HOST_OBJ) $(BUILD)/nvflags
	$(call gpu_link)

# Device code on the host: needs the CUDA headers, no GPU.
CUDA_INC := $(firstword $(wildcard /usr/local/cuda/include $(dir $(NVCC))../include))
GPU_HOST := $(if $(wildcard $(CUDA_INC)/cuda_fp16.h),$(wildcard tests/gpu/host_*.cc))
$(BUILD)/tests/gpu/host_%: tests/gpu/host_%.cc $(wildcard kernels/cuda/*.cuh kernels/cuda/*.h client/cuda/*.cuh tests/gpu/*.h)
	$(call say,CXX,$<)
	@mkdir -p $(@D)
	$(Q)$(CXX) -std=c++17 -O1 -g -Wall -Wextra -Wno-unknown-pragmas -Wno-unused-function -Wno-attributes -Wno-maybe-uninitialized \
		-DEXL3_EMULATE -I. -isystem $(CUDA_INC) $(HOST_FLAGS) -o $@ $< $(filter %.o,$^) -lpthread
$(BUILD)/tests/gpu/host_plans: kernels/cuda/plan.cu $(CUDA_HOST_OBJ)
$(BUILD)/tests/gpu/host_plans: HOST_FLAGS := $(SANFLAGS)
$(BUILD)/tests/gpu/host_gpu: client/cuda/gpu.cu client/cuda/exl3_gpu.h

# ---- goals -----------------------------------------------------------------------------------
deps: ## install the Debian packages that are missing (root or sudo), or say which
	@tests/deps.sh
.PHONY: deps

demo: ## install what is missing, build, and serve two small language models on the CPU
	@tests/deps.sh
	@$(MAKE) --no-print-directory -j$(shell nproc) all
	@tests/demo.sh $(BUILD)
.PHONY: demo

TESTS := $(UNIT:%.c=$(BUILD)/%) $(STRESS:%.c=$(BUILD)/%) $(HELPERS:%.c=$(BUILD)/%) \
	$(if $(CHECKKERNEL),$(BUILD)/tests/checkkernel/checkkernel) $(GPU_HOST:%.cc=$(BUILD)/%)
tests: probe $(TESTS) $(if $(SAN),,$(BUILD)/tests/libexhaust.so) ## build the tests
.PHONY: tests

bench: probe $(BENCH:%.c=$(BUILD)/%) ## build the benchmarks
.PHONY: bench

check: ## install what is missing, build, and run all tests (also under sanitizers)
	@tests/deps.sh
	@MAKE='$(MAKE)' NVCC='$(NVCC)' PYTHON='$(PYTHON)' tests/check.sh
.PHONY: check

CHAOS_SECONDS ?= 180
check-chaos: all tests ## minutes of kills, garbage and exhaustion beside clients that check every result (CHAOS_SECONDS)
	$(PYTHON) tests/integration/chaos.py --build $(BUILD) --seconds $(CHAOS_SECONDS)
.PHONY: check-chaos

FUZZ_BIN := $(FUZZ:tests/fuzz/%.c=$(BUILD)/fuzz/%)
fuzz: $(FUZZ_BIN) ## build the libFuzzer targets (needs clang)
.PHONY: fuzz
# What the targets link is instrumented too: one sub-make builds it, before any of them.
fuzz-libs: $(GEN)
	$(Q)$(MAKE) --no-print-directory BUILD=$(BUILD)/fuzzobj CC='$(CLANG)' CFLAGS='-O1 -g' \
		SAN=fuzzer-no-link,address,undefined WERROR=0 $(BUILD)/fuzzobj/libdaemon.a $(BUILD)/fuzzobj/libkernels.a \
		$(BUILD)/fuzzobj/libshm.a $(BUILD)/fuzzobj/libexl3.a $(BUILD)/fuzzobj/libctl.a >/dev/null
.PHONY: fuzz-libs
$(BUILD)/fuzz/%: tests/fuzz/%.c fuzz-libs
	$(call say,FUZZ,$@)
	@mkdir -p $(@D)
	$(Q)$(CLANG) -std=c11 -D_GNU_SOURCE -O1 -g -fsanitize=fuzzer,address,undefined -I. -Iclient -I$(BUILD)/gen \
		$(call pkg_cflags,$(PKGS)) -o $@ $< -Wl,--start-group $(BUILD)/fuzzobj/*.a -Wl,--end-group $(DAEMON_LIBS)

cuda: $(if $(NVCC),$(BUILD)/exl3-cuda.so $(GPU_LIB) $(GPU_TESTS:%.cu=$(BUILD)/%) $(GPU_BENCH:%.cu=$(BUILD)/%),no-nvcc) ## kernels, tests and benchmarks for CUDA_ARCHS
# One instance of every family and everything that is not an instance: minutes, not an hour.
CUDA_SMOKE := $(filter-out kernels/cuda/inst/%,$(CUDA_SRC)) \
	$(wildcard $(addprefix kernels/cuda/inst/,gemm_r8_cb1.cu gemm_candidate_r8_cb1.cu gemm_unpack_cb1.cu gemv_r08.cu mla_bf16.cu mla_wide.cu moe_r8.cu))
cuda-smoke: $(CUDA_SMOKE:%.cu=$(BUILD)/obj/%.cu.o) ## compile a part of the CUDA code that stands for all of it
.PHONY: cuda-smoke

GPU_FACT_BIN := $(patsubst tests/gpu/facts/%,$(BUILD)/tests/gpu/facts/%,$(basename $(GPU_FACTS)))
$(BUILD)/tests/gpu/facts/%: tests/gpu/facts/%.cu $(BUILD)/nvflags
	$(call say,NVCC,$@)
	@mkdir -p $(@D)
	$(Q)$(NVCC) $(ALL_NVCCFLAGS) -o $@ $< -ldl -lpthread
$(BUILD)/tests/gpu/facts/%: tests/gpu/facts/%.c $(BUILD)/flags
	$(call say,CC,$@)
	@mkdir -p $(@D)
	$(Q)$(CC) $(filter-out -Wmissing-prototypes,$(ALL_CFLAGS)) -o $@ $< -ldl -lpthread

gpu-facts: $(GPU_FACT_BIN)
check-gpu: all tests cuda gpu-facts ## all tests that need a GPU (8 minutes)
	tests/gpu/check.sh $(BUILD)
.PHONY: check-gpu gpu-facts

no-nvcc:
	@echo "nvcc not found: the CUDA backend is left out" >&2
.PHONY: cuda no-nvcc

all-archs: ## compile the CUDA code for every architecture
	$(Q)for a in 80 86 89 90a 100 120; do \
		$(MAKE) --no-print-directory CUDA_ARCHS=$$a BUILD=$(BUILD)/sm_$$a cuda || exit 1; done
.PHONY: all-archs

# The library for clients with CUDA; built by make cuda.
install-gpu:
	install -d $(DESTDIR)$(PREFIX)/include $(DESTDIR)$(LIBDIR)/pkgconfig
	install -m 755 $(GPU_LIB) $(DESTDIR)$(LIBDIR)/libexl3-gpu.so.$(VERSION)
	ln -sf libexl3-gpu.so.$(VERSION) $(DESTDIR)$(LIBDIR)/libexl3-gpu.so.0
	ln -sf libexl3-gpu.so.0 $(DESTDIR)$(LIBDIR)/libexl3-gpu.so
	install -m 644 client/cuda/exl3_gpu.h client/cuda/exl3_device.cuh $(DESTDIR)$(PREFIX)/include/
	sed -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@VERSION@|$(VERSION)|g' \
		client/cuda/exl3-gpu.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/exl3-gpu.pc
.PHONY: install-gpu

install: all ## honours DESTDIR, PREFIX, LIBDIR, UNITDIR; SYSCONFDIR as given to the build
	install -d $(DESTDIR)$(PREFIX)/bin $(DESTDIR)$(PREFIX)/sbin $(DESTDIR)$(PREFIX)/include \
		$(DESTDIR)$(LIBDIR)/pkgconfig $(DESTDIR)$(UNITDIR) $(DESTDIR)$(SYSUSERSDIR) $(DESTDIR)$(TMPFILESDIR) \
		$(foreach s,1 3 5 8,$(DESTDIR)$(PREFIX)/share/man/man$(s))
	install -m 755 $(BUILD)/exl3-daemon $(DESTDIR)$(PREFIX)/sbin/
	install -m 755 $(BUILD)/exl3ctl $(DESTDIR)$(PREFIX)/bin/
	[ ! -e $(BUILD)/exl3-cuda.so ] || install -D -m 755 $(BUILD)/exl3-cuda.so $(DESTDIR)$(PREFIX)/lib/exl3-daemon/exl3-cuda.so
	[ ! -e $(GPU_LIB) ] || $(MAKE) --no-print-directory install-gpu
	install -m 755 $(BUILD)/libexl3.so $(DESTDIR)$(LIBDIR)/libexl3.so.$(VERSION)
	ln -sf libexl3.so.$(VERSION) $(DESTDIR)$(LIBDIR)/libexl3.so.0
	ln -sf libexl3.so.0 $(DESTDIR)$(LIBDIR)/libexl3.so
	install -m 755 $(BUILD)/libexl3-mapped.so $(DESTDIR)$(LIBDIR)/
	install -m 644 $(BUILD)/libexl3.a $(DESTDIR)$(LIBDIR)/
	install -d $(DESTDIR)$(PREFIX)/share/exl3
	install -m 644 client/python/*.py $(DESTDIR)$(PREFIX)/share/exl3/
	install -D -m 644 client/exl3ctl.bash $(DESTDIR)$(PREFIX)/share/bash-completion/completions/exl3ctl
	# One public header: the ABI is put in place of its include line.
	sed -e '/#include "shm\/exl3_abi.h"/{r shm/exl3_abi.h' -e 'd}' client/exl3.h > $(BUILD)/exl3.h
	install -m 644 $(BUILD)/exl3.h $(DESTDIR)$(PREFIX)/include/exl3.h
	sed -e 's|@PREFIX@|$(PREFIX)|g' -e 's|@LIBDIR@|$(LIBDIR)|g' -e 's|@VERSION@|$(VERSION)|g' \
		client/exl3.pc.in > $(DESTDIR)$(LIBDIR)/pkgconfig/exl3.pc
	for u in systemd/*.service systemd/*.socket; do \
		sed -e 's|@PREFIX@|$(PREFIX)|g' $$u > $(DESTDIR)$(UNITDIR)/$${u##*/}; done
	for f in systemd/*sysusers*.conf; do [ ! -e $$f ] || install -m 644 $$f $(DESTDIR)$(SYSUSERSDIR)/exl3-daemon.conf; done
	for f in systemd/*tmpfiles*.conf; do [ ! -e $$f ] || install -m 644 $$f $(DESTDIR)$(TMPFILESDIR)/exl3-daemon.conf; done
	install -d $(DESTDIR)$(DOCDIR)/docs $(DESTDIR)$(DOCDIR)/examples
	install -m 644 systemd/preserve.conf README.md $(DESTDIR)$(DOCDIR)/
	install -m 644 docs/*.md $(DESTDIR)$(DOCDIR)/docs/
	install -m 644 client/examples/*.[ch] $(DESTDIR)$(DOCDIR)/examples/
	install -d $(DESTDIR)$(SYSCONFDIR)/exl3-daemon
	install -m 644 systemd/exl3-daemon.conf.example $(DESTDIR)$(SYSCONFDIR)/exl3-daemon/
	for m in client/man/*.[1358]; do \
		[ ! -e $$m ] || install -m 644 $$m $(DESTDIR)$(PREFIX)/share/man/man$${m##*.}/; done
.PHONY: install

uninstall: ## remove what install has put there, with the same variables; /etc/exl3-daemon stays
	rm -f $(addprefix $(DESTDIR),$(PREFIX)/sbin/exl3-daemon $(PREFIX)/bin/exl3ctl $(LIBDIR)/libexl3.a $(LIBDIR)/libexl3-mapped.so \
		$(foreach l,libexl3 libexl3-gpu,$(LIBDIR)/$l.so $(LIBDIR)/$l.so.0 $(LIBDIR)/$l.so.$(VERSION)) \
		$(LIBDIR)/pkgconfig/exl3.pc $(LIBDIR)/pkgconfig/exl3-gpu.pc \
		$(addprefix $(PREFIX)/include/,exl3.h exl3_gpu.h exl3_device.cuh) \
		$(PREFIX)/share/bash-completion/completions/exl3ctl $(SYSUSERSDIR)/exl3-daemon.conf $(TMPFILESDIR)/exl3-daemon.conf \
		$(patsubst systemd/%,$(UNITDIR)/%,$(wildcard systemd/*.service systemd/*.socket)) \
		$(foreach m,$(wildcard client/man/*.[1358]),$(PREFIX)/share/man/man$(subst .,,$(suffix $m))/$(notdir $m)))
	rm -rf $(addprefix $(DESTDIR)$(PREFIX)/,lib/exl3-daemon share/exl3 share/doc/exl3-daemon)
.PHONY: uninstall

format: ## clang-format on everything that is ours
	$(Q)git ls-files '*.c' '*.h' '*.cu' '*.cuh' | xargs clang-format -i
.PHONY: format

clean: ## remove the build folders
	rm -rf build build-*
.PHONY: clean

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20
	@echo "  knobs: SAN=address,undefined | SAN=thread, BUILD=DIR, CC=, CFLAGS=, NVCC=, CUDA_ARCHS='90a 80', PYTHON=, WERROR=0, V=1;"
	@echo "         for install: DESTDIR= PREFIX= LIBDIR= UNITDIR= SYSUSERSDIR= TMPFILESDIR= SYSCONFDIR="
.PHONY: help

-include $(shell find $(BUILD) -name '*.d' -type f 2>/dev/null)
