# One command each: setup, demo, test; `make check` is what tests need besides pytest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PROTOS := $(wildcard protos/v1/*.proto)
DEMO_ARGS ?=

.PHONY: setup demo test test-full check format proto proto-check proto-baseline deploy-check clean

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[worker,embedded,telemetry,benchmarks,dev]'
	touch $@

demo: setup
	$(BIN)/splitspec demo $(DEMO_ARGS)

test: check
	$(BIN)/splitspec fetch-demo-model
	$(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder -m 'not full'

# The same tests with the long forms: all prompts, all proposal lengths, all drafters.
test-full: check
	$(BIN)/splitspec fetch-demo-model
	$(BIN)/python -m pytest

check: setup proto-check
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Python stubs beside the .proto files, so that proto path = import path.
proto: setup
	$(call generate,.)

define generate
	$(BIN)/python -m grpc_tools.protoc -I . --plugin=protoc-gen-mypy=$(BIN)/protoc-gen-mypy \
		--plugin=protoc-gen-mypy_grpc=$(BIN)/protoc-gen-mypy_grpc \
		--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) $(PROTOS)
endef

# Lint, no breaking change against the last landed state, committed stubs up to date.
proto-check: setup
	$(BIN)/buf lint
	$(BIN)/buf breaking --against protos/baseline.binpb
	rm -rf build/protos && mkdir -p build/protos
	$(call generate,build/protos)
	for f in protos/v1/*_pb2*; do cmp $$f build/protos/$$f || exit 1; done

# Run when a change has landed: later changes are compared with this state.
proto-baseline: setup
	$(BIN)/buf build -o protos/baseline.binpb

# Images, compose and manifests, checked without a cluster; the tools have an environment of their own.
deploy-check:
	deploy/check.sh

clean:
	rm -rf build $(VENV) .venv-*
