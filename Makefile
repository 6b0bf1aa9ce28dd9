# Strata. `make help` lists what can be made. Objects go to build/; a new source file needs no edit here.
# Layout rules: src/ROOM/*.c is the engine (src/cli/ is the program), NAME_avx2.c and NAME_avx512.c are compiled for that
# instruction set and chosen at run time, tests/test_*.c is one cmocka program each, tests/*.sh and tests/node/*.mjs are scripts,
# bench/*.c and tools/*.c are one program each, tests/fuzz_*.c are libFuzzer targets.
BUILD ?= build
CC ?= cc
CFLAGS ?= -O3 -g
PKGS := jansson libpcre2-8 libutf8proc libxxhash hwloc
WARN := -Wall -Wextra -Wshadow -Wvla -Wpointer-arith -Wstrict-prototypes -Wmissing-prototypes -Wno-unused-parameter $(WERROR)
CPPFLAGS := -std=gnu11 -Iinclude -Isrc $(shell pkg-config --cflags $(PKGS) 2>/dev/null)
comma := ,
# The contract of design.md section 2: no contraction, no fast-math, denormals kept.
NUMBERS := -ffp-contract=off -fno-math-errno -fno-trapping-math
LDLIBS := $(shell pkg-config --libs $(PKGS) 2>/dev/null) -lm -pthread

# UBSAN (set by `make asan`) leaves the intrinsics files out: with it they take minutes to compile.
AVX2_FLAGS := -mavx2 -mfma -mf16c -mbmi2
AVX512_FLAGS := $(AVX2_FLAGS) -mavx512f -mavx512bw -mavx512vl -mavx512dq -mavx512vnni -mavx512vbmi -mavx512bitalg -mprefer-vector-width=512

# The CUDA kernels are compiled where nvcc is found (NVCC= leaves them out), with the contract's arithmetic too.
NVCC ?= $(firstword $(shell command -v nvcc) $(wildcard /usr/local/cuda/bin/nvcc /opt/cuda/bin/nvcc))
NVCCFLAGS := -std=c++17 -O3 -fmad=false -Iinclude -Isrc $(foreach a,75 80 86 89 90 120,-gencode arch=compute_$(a),code=sm_$(a)) \
    -gencode arch=compute_120,code=compute_120
FATBINS := $(if $(NVCC),$(patsubst %.cu,$(BUILD)/%.fatbin,$(wildcard src/ops/cuda/*.cu)))

LIB_SRC := $(filter-out src/cli/%,$(wildcard src/*/*.c src/*/*/*.c))
CLI_SRC := $(wildcard src/cli/*.c)
LIB_OBJ := $(LIB_SRC:%.c=$(BUILD)/%.o) $(BUILD)/src/ops/cuda/fatbin.o
CLI_OBJ := $(CLI_SRC:%.c=$(BUILD)/%.o)
TESTS := $(patsubst tests/%.c,$(BUILD)/tests/%,$(wildcard tests/test_*.c))
PROGRAMS := $(patsubst %.c,$(BUILD)/%,$(wildcard bench/*.c tools/*.c))
MODEL := models/pebble/pebble.gguf

all: $(BUILD)/strata ## build the program (build/strata)
	@:

# Where packages may have to come first, the build is a make of its own: this one asked pkg-config before they were there.
run: deps ## install what is missing, build, and let the bundled model write a story
	@$(MAKE) --no-print-directory all
	$(BUILD)/strata run -m $(MODEL) --seed 7 -n 160 -p "One morning the old captain"

test: deps-test ## install what is missing, build and run every test
	@tests/run.sh $(BUILD)

bench: deps ## speeds: kernels beside a plain read, decoding beside llama.cpp when its library is there
	@$(MAKE) --no-print-directory all programs
	@bench/run.sh $(BUILD)

asan: deps-test ## the tests with AddressSanitizer and UndefinedBehaviorSanitizer
	@MAKEFLAGS= BUILD=build-asan CFLAGS="-O1 -g -fsanitize=address -fno-omit-frame-pointer" UBSAN="-fsanitize=undefined -fno-sanitize-recover=undefined" \
	    tests/run.sh build-asan sanitizer

tsan: deps-test ## the tests of threads with ThreadSanitizer
	@MAKEFLAGS= BUILD=build-tsan CFLAGS="-O1 -g -fsanitize=thread" tests/run.sh build-tsan threads

fuzz: deps-test ## 60 s of libFuzzer per target (needs clang)
	@tests/fuzz.sh 60

programs: $(PROGRAMS)
tests: $(TESTS) $(BUILD)/tests/fault_shim.so programs all

deps:
	@tools/deps.sh build
deps-test:
	@tools/deps.sh test

install: all ## install the program into PREFIX (default /usr/local)
	install -D $(BUILD)/strata $(DESTDIR)$(or $(PREFIX),/usr/local)/bin/strata

format: ## clang-format everything
	clang-format -i $(shell git ls-files '*.c' '*.h')

clean: ## remove what was built
	rm -rf build build-asan build-tsan build-fuzz

help: ## this list
	@sed -n 's/^\([a-z-]*\):[^#]*## /\1\t/p' Makefile | sort | awk -F'\t' '{ printf "  make %-10s %s\n", $$1, $$2 }'

$(BUILD)/strata: $(CLI_OBJ) $(BUILD)/libstrata.a
	$(CC) $(CFLAGS) $(UBSAN) $(LDFLAGS) -o $@ $(CLI_OBJ) $(BUILD)/libstrata.a $(LDLIBS)
$(BUILD)/libstrata.a: $(LIB_OBJ)
	@rm -f $@
	$(AR) rcs $@ $(LIB_OBJ)
$(BUILD)/%_avx2.o: %_avx2.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(NUMBERS) $(WARN) $(AVX2_FLAGS) -MMD -MP -c -o $@ $<
$(BUILD)/%_avx512.o: %_avx512.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(NUMBERS) $(WARN) $(AVX512_FLAGS) -MMD -MP -c -o $@ $<
$(BUILD)/%.o: %.c
	@mkdir -p $(@D)
	$(CC) $(CPPFLAGS) $(CFLAGS) $(UBSAN) $(NUMBERS) $(WARN) -MMD -MP -c -o $@ $<
$(BUILD)/%.fatbin: %.cu
	@mkdir -p $(@D)
	$(NVCC) $(NVCCFLAGS) -MD -MP -MF $(@:.fatbin=.cu.d) -MT $@ -fatbin -o $@ $<
$(BUILD)/src/ops/cuda/fatbin.o: src/ops/cuda/fatbin.S $(FATBINS)
	@mkdir -p $(@D)
	$(CC) $(if $(FATBINS),-DFATBINS='$(subst $() $(),$(comma),$(FATBINS:%="%"))') -c -o $@ $<
$(BUILD)/tests/%: $(BUILD)/tests/%.o $(BUILD)/libstrata.a
	$(CC) $(CFLAGS) $(UBSAN) $(LDFLAGS) -o $@ $^ $(LDLIBS) -lcmocka -ldl
# Loaded into programs by tests/*.sh; without sanitizers, which come with the program.
$(BUILD)/tests/fault_shim.so: tests/fault_shim.c
	@mkdir -p $(@D)
	$(CC) -std=gnu11 -O1 -g $(WARN) -shared -fPIC -o $@ $< -ldl
$(BUILD)/bench/%: $(BUILD)/bench/%.o $(BUILD)/libstrata.a
	$(CC) $(CFLAGS) $(UBSAN) $(LDFLAGS) -o $@ $^ $(LDLIBS) -ldl
$(BUILD)/tools/%: $(BUILD)/tools/%.o $(BUILD)/libstrata.a
	$(CC) $(CFLAGS) $(UBSAN) $(LDFLAGS) -o $@ $^ $(LDLIBS) -ldl

.PHONY: all run test tests bench asan tsan fuzz programs deps deps-test install format clean help
.SECONDARY:
-include $(FATBINS:.fatbin=.cu.d) $(LIB_OBJ:.o=.d) $(CLI_OBJ:.o=.d) $(wildcard $(BUILD)/tests/*.d $(BUILD)/bench/*.d $(BUILD)/tools/*.d)
