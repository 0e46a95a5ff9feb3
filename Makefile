# One target per intent; the same commands in CI.
.RECIPEPREFIX := >
SHELL := /bin/bash
PYTHON ?= $(shell for python in python3.11 python3.12 python3.13 python3; do $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
NATIVE := $(VENV)/.native
PACKAGES := proto core grammar kernels engine kvtransfer rpc node prefill_node decode_node router client cli
MODEL := smollm2-135m-instruct
BASE_URL := http://127.0.0.1:8000/v1

.PHONY: help setup model check test test-deep proto goldens demo gpu bench bench-transfer outside clean

help: ## show the targets
> @grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 10

setup: $(STAMP) ## create .venv and install pdserve with its development tools
> @$(MAKE) --silent $(NATIVE)

$(STAMP): pyproject.toml constraints-dev.txt
> @[ -n "$(PYTHON)" ] || { echo "setup: pdserve needs Python 3.11 or newer; name it with make PYTHON=…" >&2; exit 1; }
> @echo "setup: creating $(VENV) with $$($(PYTHON) --version)"
> $(PYTHON) -m venv $(VENV)
> $(BIN)/python -m pip install --quiet --upgrade "pip>=25.1"
> @echo "setup: installing (about 2.2 GB on the first run: torch, triton)"
> $(BIN)/python -m pip install --progress-bar on -c constraints-dev.txt --group dev -e .
> @touch $(STAMP) $(NATIVE)

# Installing builds the native operations; this builds them again when their sources change. Asked for by a make of its own, which
# sees what installing has just touched. Without a compiler pdserve works with torch alone.
$(NATIVE): kernels/build_native.py $(wildcard kernels/pdserve/kernels/native/src/*)
> @$(BIN)/python kernels/build_native.py || echo "setup: no native operations; torch alone will compute, slower" >&2
> @touch $(NATIVE)

model: setup ## fetch and convert the default model into the user's cache
> $(BIN)/pdserve pull $(MODEL)

check: setup ## lint, types, import contracts, contract lint
> $(BIN)/ruff check .
> $(BIN)/ruff format --check .
> cd proto && ../$(BIN)/buf lint
> $(BIN)/lint-imports
> $(BIN)/mypy

test: setup model ## all tests
> $(BIN)/python -m pytest -q --durations=15

test-deep: setup model ## longer proofs, which CI does not run: about 20 minutes
> $(BIN)/python -m pytest -q -m deep --durations=15

proto: setup ## regenerate the code of the contract
> $(BIN)/python -m grpc_tools.protoc -Iproto --python_out=proto --grpc_python_out=proto \
>   --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy --plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
>   --mypy_out=proto --mypy_grpc_out=proto proto/pdserve/v1/*.proto

goldens: setup model ## rewrite tests/goldens from plain transformers
> $(BIN)/python -m tests.goldens.make

demo: setup ## a streamed answer through router, prefill and decode processes
> $(BIN)/pdserve demo

gpu: setup ## what needs a GPU to be known, ten minutes at most on one card; "not run" where there is none
> $(BIN)/python -m tests.gpu

bench: setup model ## the record: decode rate, TTFT, ITL, cancel and idle figures
> $(BIN)/python -m tests.bench

bench-transfer: setup model ## KV transfer beside raw TCP and memcpy: ratios as gates, hidden share
> $(BIN)/python -m tests.bench.transfer

outside: ## ask a running router (BASE_URL) everything with OpenAI's own client, from an environment of its own
> [ -x .venv-openai/bin/python ] || { $(PYTHON) -m venv .venv-openai && .venv-openai/bin/pip install --quiet openai jsonschema; }
> .venv-openai/bin/python examples/openai_check.py --base-url $(BASE_URL)

clean: ## remove .venv and caches (the model cache stays)
> rm -rf $(VENV) .venv-openai .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist
> find . -name __pycache__ -type d -prune -exec rm -rf {} +
