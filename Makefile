# Two commands for a fresh machine with python3 and make: `make demo` and `make test`.
#
#   PYTHON    the interpreter for .venv (3.11 or newer)
#   PIP_ARGS  more arguments for every `pip install`. On Linux x86 the torch on PyPI is the CUDA build
#             (several GB); a merge needs no GPU, so take the CPU build:
#                 make demo PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
#   TORCH     the torch that is installed first, so that pip does not choose the newest CUDA build by
#             itself. Local wheels that pip's configuration points at (`find-links`) are taken too.
#   NIGHTLY   the folder of `make nightly`'s environments: a vLLM for CPUs, two versions of transformers (4 GB)
PYTHON   ?= python3
PIP_ARGS ?=
TORCH    ?= torch==2.13.0
JOBS     ?= 2
NIGHTLY  ?= $(HOME)/.cache/merge-stream-nightly

VENV  := .venv
BIN   := $(VENV)/bin
STAMP := $(VENV)/.installed
FAST  := not slow and not real and not memory and not crash

# Hundreds of tests start the tool: compiled modules are kept, and not beside the sources.
export PYTHONPYCACHEPREFIX := $(CURDIR)/$(VENV)/pycache
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo test check lint fuzz crash bench bench-smoke nightly docs clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

$(STAMP): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { echo "error: '$(PYTHON)' is not on the PATH; merge-stream needs Python 3.11 or newer (make PYTHON=/path/to/python3.12)" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit("error: merge-stream needs Python 3.11 or newer, %s is %d.%d (choose another: make PYTHON=/path/to/python3.12)" % (sys.executable, v[0], v[1]) if v < (3, 11) else 0)'
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { echo "error: '$(PYTHON) -m venv' failed; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) '$(TORCH)'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) -e '.[dev,docs]'
	@touch $@

demo: $(STAMP)  ## a real FSDP2 checkpoint on 2 CPU ranks -> one model, verified
	$(BIN)/python -m tests.makers.demo

test: $(STAMP)  ## the whole test suite
	$(BIN)/python -m pytest -n $(JOBS)

check: lint  ## format, lint, types, import directions, fast tests (under 3 minutes on 2 cores)
	$(BIN)/python -m pytest -n $(JOBS) -m "$(FAST)"

lint: $(STAMP)  ## the part of `check` that runs no code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy --strict
	$(BIN)/python -m pytest -q tests/test_imports.py

# atheris has wheels for CPython 3.11 to 3.13 on Linux and macOS; it is in no extra, for nothing else needs it
FUZZ_INPUTS  ?= 200000
FUZZ_SECONDS ?= 600
fuzz: $(STAMP)  ## damaged checkpoints: structured mutations, then coverage-guided (about 25 + 10 minutes)
	$(BIN)/python -m tests.hostile.fuzz --inputs $(FUZZ_INPUTS)
	$(BIN)/python -m tests.hostile.fuzz --kind side --inputs 20000
	@test -x .venv-fuzz/bin/python || $(BIN)/python -m venv .venv-fuzz
	.venv-fuzz/bin/python -m pip install --quiet --disable-pip-version-check $(PIP_ARGS) 'atheris>=3' numpy psutil ml_dtypes xxhash
	PYTHONPATH=src .venv-fuzz/bin/python -m tests.hostile.coverage_fuzz .fuzz-corpus -max_total_time=$(FUZZ_SECONDS) -rss_limit_mb=2000 -timeout=10 -artifact_prefix=.fuzz-corpus/

crash: $(STAMP)  ## 100 random kill -9 + resume runs, outputs compared byte for byte
	$(BIN)/python -m tests.crash.kill_resume --runs 100

# BENCH="--only layouts" measures one group again
BENCH ?=
bench: $(STAMP)  ## merge-stream against the floor, the in-memory way and torch's consolidation (15 minutes)
	$(BIN)/python -m bench.compare $(BENCH)

bench-smoke: $(STAMP)  ## the same on a small checkpoint, with generous limits (1 minute)
	$(BIN)/python -m bench.compare --smoke

# 5.24 cannot load a LongCat of this size (docs/architectures.md)
BOTH = $$($(BIN)/python -c "from tests.families.models import MODELS; print(*(n for n in MODELS if n != 'longcat_flash'))")
nightly: $(STAMP)  ## do merged models load? in transformers 4.57 and 5.24, and in a real vLLM (CPU)
	$(BIN)/python -m tests.nightly.environments $(NIGHTLY) $(PIP_ARGS)
	$(BIN)/python -m tests.families.load_merged --tf5 $(NIGHTLY)/tf5 --tf4 $(NIGHTLY)/tf4 --more $(NIGHTLY)/tfs $(BOTH)
	for tf in tf4 tf5; do PYTHONPATH=$(NIGHTLY)/$$tf:$(NIGHTLY)/tfs $(BIN)/python -W ignore -m tests.nightly.accepted || exit 1; done
	PYTHONPATH=$(NIGHTLY)/tf5:$(NIGHTLY)/tfs:$(NIGHTLY)/ct $(BIN)/python -m tests.nightly.quantized
	ALL_SCHEMES=1 $(BIN)/python -m pytest -q tests/memory/test_quantized.py
	$(BIN)/python -m tests.nightly.vllm_cpu --python $(NIGHTLY)/vllm/bin/python --trainer $(NIGHTLY)/tf5:$(NIGHTLY)/tfs
	$(BIN)/python -m tests.nightly.vllm_quantized --python $(NIGHTLY)/vllm/bin/python --trainer $(NIGHTLY)/tf5:$(NIGHTLY)/tfs

docs: $(STAMP)  ## the documentation, into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

clean:  ## what the tools left behind (not .venv)
	rm -rf build dist site .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests bench -name __pycache__ -type d -prune -exec rm -rf {} + 2>/dev/null || true
