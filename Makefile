PYTHON = python3

# The branch of the NVIDIA driver that is here; empty without one.
DRIVER := $(shell nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null | head -n 1 | grep -o '^[0-9]*')
ifeq ($(DRIVER),)
  ARGS = --model mistral-7b --gpu h200
  BASE = .venv/.base
  WANTED = --constraint constraints.txt --editable .
else
  # CUDA 13 begins with driver 580; what is older takes other packages than the tested ones.
  CUDA := $(shell test $(DRIVER) -ge 580 && echo cuda || echo cuda12)
  ARGS = --model llama3.2-1b
  BASE = .venv/.$(CUDA)
  WANTED = $(if $(filter cuda,$(CUDA)),--constraint constraints.txt )--editable '.[$(CUDA),torch,hf]'
endif

BIN = .venv/bin
PIP_INSTALL = $(BIN)/python -m pip install --quiet --disable-pip-version-check
PINS = pyproject.toml constraints.txt

.PHONY: search test clean constraints
.NOTPARALLEL:

# Without bytecode, every process that a test starts compiles the package again.
unexport PYTHONDONTWRITEBYTECODE

# Measures on the GPU that is here, else predicts.
search: $(BASE)
	@$(BIN)/flywheel search $(ARGS)

test: .venv/.dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo
	$(BIN)/python -m pytest --quiet --numprocesses auto --dist worksteal --timeout 300

clean:
	rm -rf .venv build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis flywheel.egg-info

# No pin of nvidia-cuda-nvrtc: each of torch's CUDA builds asks for one exact version of it.
constraints: build/pins/.created
	build/pins/bin/python -m pip install --quiet --editable '.[dev]'
	{ echo "# Tested versions, written by: make constraints PYTHON=python3.11"; \
	  build/pins/bin/python -m pip freeze --all --exclude pip --exclude nvidia-cuda-nvrtc --exclude-editable \
	  | sed 's/+cpu$$//'; } >constraints.txt
	rm -rf build/pins

$(BASE): .venv/.created $(PINS)
	@echo "flywheel: installing into .venv: pip install $(WANTED)" >&2
	@$(PIP_INSTALL) $(WANTED) >&2
	@touch $@

.venv/.dev: .venv/.created $(PINS)
	@echo "flywheel: installing into .venv, with what the tests need" >&2
	@$(PIP_INSTALL) --constraint constraints.txt --editable '.[dev]' >&2
	@touch $(filter-out .venv/.cuda12,$(BASE)) $@

%/.created:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
	  echo "flywheel: needs Python >= 3.11; $(PYTHON) is older or missing: make PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "flywheel: $(PYTHON) has no venv module: on Debian and Ubuntu, apt install python3-venv" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $*
	@touch $@
