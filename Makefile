# The table of contents. Minutes are for two CPU cores; nothing but Python packages is downloaded.

PYTHON ?= python3
PY := .venv/bin/python

.PHONY: all setup data baseline test clean

all: baseline                   # set up, train the toy model, leave a picture and a sample of its text

setup: .venv/ready              # the virtual environment with the pinned packages: 1 to 3 minutes
.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or later, here is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

data: data/toy/train.json       # the toy data, from Python's own standard library: seconds
data/toy/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py

baseline: data/toy/train.json   # an ordinary model: out/baseline/loss.png, 5 minutes
	$(PY) train.py config/baseline.py
	$(PY) sample.py out/baseline

test: .venv/ready               # every test, a worker a core: 1 minute
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto

clean:                          # the data and the environment; out/ stays
	rm -rf .venv data/toy/*.bin data/toy/*.marks data/toy/*.json
