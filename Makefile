# `make demo` and `make test` set up what they need in .venv, on a machine without a GPU, with
# nothing but Python 3.11 or newer.
#
#   make test PY=python3        use this interpreter as it is (say, with a GPU build of torch)
#   make test VENV=/some/env    use this environment as it is; if there is none, make it there
#   make test-triton NEWEST_VENV=/some/env   use this environment of the newest triton, or make it there
#   make test-cutlass CUTLASS_VENV=/some/env   use this environment with CUTLASS's DSL, or make it there
#   make test-vllm VLLM_VENV=/some/env   use this environment with vLLM's layers, or make it there
#   make test-sglang SGLANG_VENV=/some/env     use this environment with SGLang, or make it there
#   make docs DOCS_VENV=/some/env   use this environment of Sphinx, or make it there
#   make test ARGS="-k name"    hand options to pytest (or, with `make demo`, to `mk demo`)

SHELL      := /bin/bash
PYTHON     ?= python3
VENV       ?= .venv
# Ranks mostly wait for each other: three workers keep two processors busy.
WORKERS    ?= 3
ARGS       ?=
PIP_FLAGS  := --disable-pip-version-check -qq
EXTRAS     := test,dev,transformers,bench

TORCH      ?= $(shell grep '^torch==' constraints-cpu.txt)
# A release may have a build for CPUs alone; of a file, or of a build that is named, there is one.
RELEASE    := $(foreach one,$(filter torch==%,$(TORCH)),$(if $(findstring +,$(one)),,$(one)))
COMMA      := ,

# One thread for each process: kernels under test run in many small steps, side by side.
export OPENBLAS_NUM_THREADS := 1
export OMP_NUM_THREADS      := 1
export PYTHONPATH           := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))

# An environment is ours if it carries our mark. Anybody else's is used and never changed.
MARK       := $(VENV)/.made-by-make
STAMP      := $(VENV)/.installed
FOUND      := $(wildcard $(VENV)/bin/python)
ifdef PY
  READY    := metadata
else ifeq ($(if $(FOUND),$(wildcard $(MARK)),new),)
  PY       := $(VENV)/bin/python
  READY    := metadata
else
  PY       := $(VENV)/bin/python
  READY    := $(STAMP)
endif

# The docs are built without torch, in an environment of their own.
DOCS_VENV  ?= .venv-docs
DOCS_MARK  := $(DOCS_VENV)/.made-by-make
DOCS_STAMP := $(DOCS_VENV)/.installed
ifeq ($(if $(wildcard $(DOCS_VENV)/bin/python),$(wildcard $(DOCS_MARK)),new),)
  DOCS_READY :=
else
  DOCS_READY := $(DOCS_STAMP)
endif

# The newest triton that setup.py admits, beside the oldest one that all else is tested with.
NEWEST_VENV  ?= .venv-newest
NEWEST_WORKERS ?= 2
NEWEST_TESTS ?= tests/interpreter tests/core/test_cuda_replay.py tests/core/test_replayed_launch.py $(wildcard tests/ops/test_ops_*.py)
# Tests of tests/compile beyond the check of all kernels; newest-compile-all runs all of them. Two
# known regressions with triton 3.9 are left out: nvfp4 kernels use more register permutes than the
# tests allow, and the float32 kernel of the adapter branch spills 24 bytes at ranks from 64 on.
NEWEST_COMPILED ?= tests/compile/test_aligned_w4_compile.py tests/compile/test_moe_lora_compile.py
NEWEST_MARK  := $(NEWEST_VENV)/.made-by-make
NEWEST_STAMP := $(NEWEST_VENV)/.installed
NEWEST_PY    := $(NEWEST_VENV)/bin/python
ifeq ($(if $(wildcard $(NEWEST_PY)),$(wildcard $(NEWEST_MARK)),new),)
  NEWEST_READY :=
else
  NEWEST_READY := $(NEWEST_STAMP)
endif

# CUTLASS's DSL, an extra of its own, beside all that `make test` has.
CUTLASS_VENV  ?= .venv-cutlass
CUTLASS_TESTS ?= $(wildcard tests/compile/test_cutlass*.py)
CUTLASS_MARK  := $(CUTLASS_VENV)/.made-by-make
CUTLASS_STAMP := $(CUTLASS_VENV)/.installed
CUTLASS_PY    := $(CUTLASS_VENV)/bin/python
ifeq ($(if $(wildcard $(CUTLASS_PY)),$(wildcard $(CUTLASS_MARK)),new),)
  CUTLASS_READY :=
else
  CUTLASS_READY := $(CUTLASS_STAMP)
endif

# vLLM without its compiled extension, for tests of the plugin with its layers.
VLLM_VERSION ?= 0.33.0
VLLM_VENV    ?= .venv-vllm
VLLM_TESTS   ?= tests/integrations/in_vllm
VLLM_MARK    := $(VLLM_VENV)/.made-by-make
VLLM_STAMP   := $(VLLM_VENV)/.installed
VLLM_PY      := $(VLLM_VENV)/bin/python
ifeq ($(if $(wildcard $(VLLM_PY)),$(wildcard $(VLLM_MARK)),new),)
  VLLM_READY :=
else
  VLLM_READY := $(VLLM_STAMP)
endif

# SGLang without its GPU packages, beside all that `make test` has.
SGLANG_VENV  ?= .venv-sglang
SGLANG_TESTS ?= tests/integrations/in_sglang
SGLANG_MARK  := $(SGLANG_VENV)/.made-by-make
SGLANG_STAMP := $(SGLANG_VENV)/.installed
SGLANG_PY    := $(SGLANG_VENV)/bin/python
ifeq ($(if $(wildcard $(SGLANG_PY)),$(wildcard $(SGLANG_MARK)),new),)
  SGLANG_READY :=
else
  SGLANG_READY := $(SGLANG_STAMP)
endif

.PHONY: environments help demo test test-rest test-all bench fuzz verify test-interpreter test-compile test-gpu check docs docs-site test-triton newest-compile newest-compile-all newest-interpreter test-cutlass test-vllm test-sglang wheel clean metadata test-isa isa
.DEFAULT_GOAL := help

help:
	@echo "make demo    small models and quantized checkpoints, each checked and timed on this machine"
	@echo "make test    a test suite of about eight minutes on a CPU: kernels interpreted, then compiled"
	@echo "make test-rest      most of the tests that 'make test' leaves out, in about twelve minutes"
	@echo "make test-all       every test"
	@echo "make test-isa       parts of plain torch under each CPU instruction set that this machine has"
	@echo "make test-triton    every kernel compiled and a short suite interpreted with the newest triton"
	@echo "make test-cutlass   the kernels in CUTLASS's DSL compiled, without a GPU"
	@echo "make test-vllm      the plugin for vLLM in layers of vLLM itself, on a CPU"
	@echo "make test-sglang    layers of SGLang on our backend, without a GPU"
	@echo "make verify  every case of every pair of parts; its record, with the commit, in $(VERIFIED)"
	@echo "make bench   compares our layers with public ones on this GPU; table and plot in out/bench"
	@echo "make fuzz    calls the public API with 50,000 random inputs"
	@echo "make check   lint, format, spelling, types, rules for imports"
	@echo "make docs    the docs as a site in out/docs; warnings are errors"
	@echo "make docs-site  adds that site to out/site, a folder with one site for each version"
	@echo "make wheel   build dist/*.whl"
	@echo "make clean   remove all that make has made, the environment included"
	@echo
	@echo "demo, test and check install what they need into .venv, once; docs into .venv-docs,"
	@echo "test-triton what it needs beside that into .venv-newest, test-cutlass into .venv-cutlass,"
	@echo "test-vllm into .venv-vllm, test-sglang into .venv-sglang."
	@echo "With a GPU: 'make test-gpu PY=python3' uses a torch that is already there."

# All environments at once: `make -j3 environments` installs them side by side.
environments: $(READY) $(NEWEST_READY) $(CUTLASS_READY) $(DOCS_READY)

demo: $(READY)
	$(PY) -m modular_kernel demo $(ARGS)

# The tests that take little time for what they cover; `test-rest` runs most of the others, by
# shares that change with the sources, and `test-all` every test. See tests/helpers/suites.py.
SUITE      ?= quick

test: test-interpreter test-compile

test-rest:
	@$(MAKE) --no-print-directory test SUITE=rest

test-all:
	@$(MAKE) --no-print-directory test SUITE=all

test-interpreter: $(READY)
	TRITON_INTERPRET=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal --suite $(SUITE) tests --ignore=tests/compile $(ARGS)

# A process can interpret kernels or compile them, not both. The file that takes longest has few
# tests: reordered, it would begin last.
test-compile: $(READY)
	env -u TRITON_INTERPRET $(PY) -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder --suite $(SUITE) tests/compile $(ARGS)

# What oneDNN may use is read once in a process: cases of the torch parts run in one for each set.
ISA_TESTS  ?= tests/compile/test_torch_parts_isa.py

test-isa: $(READY)
	$(PY) tools/cpu_isa.py -- $(PY) -m pytest -q -p no:cacheprovider -n 2 $(ISA_TESTS) $(ARGS)

isa: $(READY)
	@$(PY) tools/cpu_isa.py

# What takes time is measured when nothing else runs: tests marked `alone` come after the others.
# Tests of a machine without a GPU run where none is in sight.
test-gpu: $(READY)
	env -u TRITON_INTERPRET $(PY) -m pytest -n $(WORKERS) --dist worksteal -m "not alone" tests --ignore=tests/compile $(ARGS)
	env -u TRITON_INTERPRET $(PY) -m pytest -m alone tests/gpu $(ARGS)
	CUDA_VISIBLE_DEVICES= TRITON_INTERPRET=1 $(PY) -m pytest -n $(WORKERS) --dist worksteal -m cpu tests $(ARGS)

# The oldest triton is that of `make test`. One half after the other: each is for two processors.
test-triton: $(NEWEST_READY)
	@$(NEWEST_PY) setup.py -q egg_info
	@$(MAKE) --no-print-directory newest-compile
	@$(MAKE) --no-print-directory newest-interpreter

newest-compile:
	@mkdir -p out
	@env -u TRITON_INTERPRET $(NEWEST_PY) -m modular_kernel compile --check --workers $(NEWEST_WORKERS) \
	  --json out/compile-newest.json > out/compile-newest.txt || [ $$? = 1 ] || { cat out/compile-newest.txt; exit 1; }
	@$(NEWEST_PY) tests/helpers/newest_violations.py out/compile-newest.json
	@tail -n 1 out/compile-newest.txt
	env -u TRITON_INTERPRET $(NEWEST_PY) -m pytest -q -p no:cacheprovider -n $(NEWEST_WORKERS) --whole \
	  -k "not nvfp4 and not (test_kernels_compile_without_violations and dtype0)" $(NEWEST_COMPILED)

newest-compile-all: $(NEWEST_READY)
	env -u TRITON_INTERPRET $(NEWEST_PY) -m pytest -q -p no:cacheprovider -n $(NEWEST_WORKERS) --dist loadfile \
	  --no-loadscope-reorder --whole tests/compile

newest-interpreter:
	TRITON_INTERPRET=1 $(NEWEST_PY) -m pytest -q -p no:cacheprovider -n $(NEWEST_WORKERS) --suite $(SUITE) $(NEWEST_TESTS)
	TRITON_INTERPRET=1 $(NEWEST_PY) -m modular_kernel test --pf-type MoEPrepareAndFinalizeNoEP \
	  --experts-type TritonExperts

# Where the DSL cannot be imported, the tests would be skipped: ask first.
test-cutlass: $(CUTLASS_READY)
	$(CUTLASS_PY) -c 'import cutlass.cute, tvm_ffi'
	env -u TRITON_INTERPRET $(CUTLASS_PY) -m pytest -q -p no:cacheprovider -n 2 $(CUTLASS_TESTS) $(ARGS)

# Where vLLM cannot be imported, the tests would be left out: ask first.
test-vllm: $(VLLM_READY)
	VLLM_TARGET_DEVICE=cpu $(VLLM_PY) -c 'import vllm; print("vllm", vllm.__version__)'
	VLLM_TARGET_DEVICE=cpu TRITON_INTERPRET=1 $(VLLM_PY) -m pytest -q -p no:cacheprovider --whole $(VLLM_TESTS) $(ARGS)

# Elsewhere none of these tests is collected: ask first. The plugin is found by its entry point.
test-sglang: $(SGLANG_READY)
	$(SGLANG_PY) -c 'from importlib.metadata import version; version("sglang")'
	@$(SGLANG_PY) setup.py -q egg_info
	$(SGLANG_PY) -m pytest -q -p no:cacheprovider -n 2 --dist loadfile --whole $(SGLANG_TESTS) $(ARGS)

# The record is checked in: what was proven, of which commit, with which versions.
VERIFIED   := docs/verified.json

verify: $(READY)
	@git diff --quiet HEAD || { echo "error: commit first: the record names the commit" >&2; exit 1; }
	@mkdir -p out
	rm -f out/verified-*.json
	TRITON_INTERPRET=1 $(PY) -m modular_kernel test --level full --json out/verified-1.json; one=$$?; \
	  TRITON_INTERPRET=1 $(PY) -m modular_kernel test --level full --world-size 2 --backend gloo \
	    --json out/verified-2.json; two=$$?; \
	  $(PY) tools/verify_record.py "$$(git rev-parse HEAD)" out/verified-*.json > $(VERIFIED) && \
	  TRITON_INTERPRET=1 PYTHONPATH=tests/helpers $(PY) tests/helpers/prove_vendor_parts.py && \
	  TRITON_INTERPRET=1 $(PY) -m pytest -q -n $(WORKERS) -m share --whole tests --ignore=tests/compile && \
	  env -u TRITON_INTERPRET $(PY) -m pytest -q -n $(WORKERS) -m share --whole tests/compile && \
	  exit $$((one > two ? one : two))

# Needs a GPU; with ARGS=--tiny it runs on any machine. Public layers are measured if their packages
# are installed: vllm==0.26.0, flashinfer-python==0.7.2.
bench: $(READY)
	$(PY) tools/bench.py $(ARGS)

fuzz: $(READY)
	$(PY) -m modular_kernel.testing.stress.fuzz --count 50000 $(ARGS)

check: $(READY)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m codespell_lib
	$(PY) -m mypy
	$(PY) -c "from importlinter.cli import lint_imports_command as run; run()" --no-logo --no-cache

docs: $(DOCS_READY)
	rm -rf out/docs
	$(DOCS_VENV)/bin/python -m sphinx -W --keep-going -q -b html docs out/docs
	@echo "built out/docs/index.html"

docs-site: docs
	$(DOCS_VENV)/bin/python docs/publish.py out/docs out/site
	@echo "built out/site/index.html"

wheel: $(READY)
	rm -rf build dist
	$(PY) -m pip wheel $(PIP_FLAGS) --no-deps --no-build-isolation --wheel-dir dist .
	rm -rf build

clean:
	rm -rf build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.*' -prune -exec rm -rf {} +
	rm -rf out/docs
	@if [ -e "$(MARK)" ]; then echo "rm -rf $(VENV)"; rm -rf "$(VENV)"; fi
	@if [ -e "$(NEWEST_MARK)" ]; then echo "rm -rf $(NEWEST_VENV)"; rm -rf "$(NEWEST_VENV)"; fi
	@if [ -e "$(CUTLASS_MARK)" ]; then echo "rm -rf $(CUTLASS_VENV)"; rm -rf "$(CUTLASS_VENV)"; fi
	@if [ -e "$(VLLM_MARK)" ]; then echo "rm -rf $(VLLM_VENV)"; rm -rf "$(VLLM_VENV)"; fi
	@if [ -e "$(SGLANG_MARK)" ]; then echo "rm -rf $(SGLANG_VENV)"; rm -rf "$(SGLANG_VENV)"; fi
	@if [ -e "$(DOCS_MARK)" ]; then echo "rm -rf $(DOCS_VENV)"; rm -rf "$(DOCS_VENV)"; fi

# Somebody else's environment: install nothing there. Entry points are read from metadata beside
# the packages, which this writes into the checkout.
metadata:
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PY) is missing or older than Python 3.11" >&2; exit 1; }
	@$(PY) setup.py -q egg_info

$(STAMP): setup.py constraints-cpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is missing or older than Python 3.11; say 'make PYTHON=/path/to/python3.11 ...'" >&2; exit 1; }
	@echo "setting up $(VENV) (about a minute, 2 GB)"
	@mkdir -p $(VENV) && touch $(MARK)
	@[ -x $(VENV)/bin/python ] || $(PYTHON) -m venv $(VENV)
	@{ $(if $(RELEASE),$(VENV)/bin/python -m pip install $(PIP_FLAGS) '$(RELEASE)+cpu' 2>/dev/null,false); } \
	  || { $(if $(RELEASE),echo "pip finds no CPU-only build: taking $(TORCH)$(COMMA) on Linux with gigabytes of CUDA";) \
	       $(VENV)/bin/python -m pip install $(PIP_FLAGS) '$(TORCH)'; }
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints-cpu.txt setuptools wheel
	$(VENV)/bin/python -m pip install $(PIP_FLAGS) -c constraints-cpu.txt --no-build-isolation -e '.[$(EXTRAS)]'
	@touch $@

# Both have packages of their own; all else they find behind them in the environment of `make test`.
# A directory named in a .pth file comes after that which holds the file.
define beside_make_test
	@mkdir -p $(1) && touch $(1)/.made-by-make
	@[ -x $(1)/bin/python ] || $(PY) -m venv --without-pip $(1)
	$(PY) -m pip --python $(1)/bin/python install $(PIP_FLAGS) --no-deps -r $(2)
	@$(PY) -I -c 'import sys; print(*(p for p in sys.path if p.endswith("-packages")), sep="\n")' \
	  > "$$($(1)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/of-make-test.pth"
	@touch $(1)/.installed
endef

$(NEWEST_STAMP): constraints-newest.txt | $(READY)
	@echo "setting up $(NEWEST_VENV) (about half a minute, 1.1 GB)"
	$(call beside_make_test,$(NEWEST_VENV),constraints-newest.txt)

$(CUTLASS_STAMP): constraints-cutlass.txt | $(READY)
	@echo "setting up $(CUTLASS_VENV) (about half a minute, 330 MB)"
	$(call beside_make_test,$(CUTLASS_VENV),constraints-cutlass.txt)

# The target device "empty" builds vLLM without extensions. Its build imports torch, which is found
# behind the new environment by then.
$(VLLM_STAMP): constraints-vllm.txt | $(READY)
	@echo "setting up $(VLLM_VENV) (about two minutes, 300 MB)"
	$(call beside_make_test,$(VLLM_VENV),constraints-vllm.txt)
	@rm $@
	VLLM_TARGET_DEVICE=empty VLLM_VERSION_OVERRIDE=$(VLLM_VERSION) $(PY) -m pip --python $(VLLM_PY) install $(PIP_FLAGS) --no-deps --no-build-isolation \
	  --no-binary vllm 'vllm==$(VLLM_VERSION)'
	@touch $@

$(SGLANG_STAMP): constraints-sglang.txt | $(READY)
	@echo "setting up $(SGLANG_VENV) (about a minute, 320 MB)"
	$(call beside_make_test,$(SGLANG_VENV),constraints-sglang.txt)

$(DOCS_STAMP): constraints-docs.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "error: $(PYTHON) is missing or older than Python 3.11; say 'make PYTHON=/path/to/python3.11 ...'" >&2; exit 1; }
	@echo "setting up $(DOCS_VENV) (about ten seconds, 110 MB)"
	@mkdir -p $(DOCS_VENV) && touch $(DOCS_MARK)
	@[ -x $(DOCS_VENV)/bin/python ] || $(PYTHON) -m venv $(DOCS_VENV)
	$(DOCS_VENV)/bin/python -m pip install $(PIP_FLAGS) --no-deps -r constraints-docs.txt
	@touch $@
