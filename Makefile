# The table of contents. Minutes are for two CPU cores; nothing but Python packages is downloaded.

PYTHON ?= python3
PY := .venv/bin/python

.PHONY: all setup data lidas baseline toys toys-grown toys-looped growing looping primitives sft retrofit sweeps probes bench gpu diagrams demo origins little hf evals test families torture planted browser readme clean

all: lidas                      # set up, grow the toy model, leave a picture and a sample of its text: 3 to 6 minutes

setup: .venv/ready              # the virtual environment with the pinned packages: 1 to 3 minutes
.venv/ready: requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "make needs Python 3.11 or later, here is " + sys.version.split()[0] + ": make PYTHON=...")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements.txt
	touch $@

data: data/toy/train.json       # the toy data, from Python's own standard library: seconds
data/toy/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py

lidas baseline: data/toy/train.json     # a grown model, an ordinary one: out/lidas/loss.png, out/baseline/loss.png, 2 to 5 minutes
	$(PY) train.py config/$@.py
	$(PY) nanodepth.py sample out/$@

# ---- the study that docs/RESULTS.md judges: a seed is trained, measured and written to docs/results, then committed

seed-%: data/chains/train.json data/chains_deep/train.json      # make seed-3: its jobs add up to 80 minutes; a stopped one goes on
	$(PY) nanodepth.py study $*
	$(PY) nanodepth.py results
page-%: data/toy/train.json data/toy_deep/train.json     # make page-4: a seed of the README's models, 70 minutes of one core
	$(PY) nanodepth.py study $* --job=page
	$(PY) nanodepth.py results
data/chains/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py --depths=5 --values=3 --out=data/chains
data/chains_deep/train.json: data/toy/prepare.py | .venv/ready
	$(PY) data/toy/prepare.py --depths=7 --values=3 --out=data/chains_deep

# ---- the first toy's runs: out/toys/NAME-SEED, one thread each, two side by side. A stopped `make toys` goes on.

SEEDS := 0 1 2
GROWN := baseline baseline_isoflops midas lidas stack ln_scaling
LOOPED := loop_4x2 loop_1_2x3_1 loop_2x4 standard_4 standard_2 lidas_cooldown_loop baseline_cooldown_loop
# runs that are a config with a flag or two: docs/FIGURES.md
as_stack := config/midas.py --grow=stack
as_ln_scaling := config/baseline.py --ln_scaling=true
as_standard_2 := config/baseline.py --n_layer=2
as_standard_4 := config/baseline.py --n_layer=4
as_loop_4x2 := config/baseline.py --n_layer=4 --loop=4x2
as_baseline_cooldown_loop := config/baseline.py --cooldown_loop=3-2x2-3
which = $(or $(as_$(1)),config/$(1).py)
seeds = $(foreach seed,$(SEEDS),$(foreach toy,$(1),out/toys/$(toy)-$(seed)))

toys: toys-grown toys-looped    # every model and seed that the figures need: 2 hours
toys-grown: data/toy/train.json         # those of the growing section: 1 hour
	$(MAKE) --jobs=2 $(addsuffix /loss.png,$(call seeds,$(GROWN)))
toys-looped: data/toy/train.json        # those of the looping section: 1 hour
	$(MAKE) --jobs=2 $(addsuffix /loss.png,$(call seeds,$(LOOPED)))
out/toys/%/loss.png: | .venv/ready
	@mkdir -p $(@D)
	OMP_NUM_THREADS=1 $(PY) train.py $(call which,$(firstword $(subst -, ,$*))) --seed=$(lastword $(subst -, ,$*)) --out_dir=$(@D) 2>$(@D)/progress.txt || { tail -n 3 $(@D)/progress.txt; exit 1; }

growing: toys-grown             # growing against ordinary training: out/growing.png, and the numbers of docs/TOY.md
	$(PY) nanodepth.py plot $(call seeds,$(GROWN)) --out=out/growing.png
looping: toys                   # loops against their partners, every block repeated: out/looping.png, out/looping_tradeoffs.png, 45 minutes
	$(PY) loop.py $(call seeds,baseline midas lidas $(LOOPED)) --tasks=toy_assign/4,toy_assign/5 --show=loss,toy_assign/4 --out=out/looping.png
primitives: toys                # depth 0 to 5, of which 4 and 5 are not in the mix: out/primitives.png
	$(PY) nanodepth.py primitives $(call seeds,$(GROWN) $(LOOPED)) --depths=0,1,2,3,4,5 --n=500 --out=out/primitives.png

# ---- fine-tuning on a form that the mix does not have: out/sft/EXAMPLES/NAME-SEED

SIZES := 32 128 512
TIED := loop_4x2 loop_1_2x3_1 loop_2x4
TAUGHT := baseline midas lidas standard_4 $(TIED) $(TIED:%=untied_%)
sft: toys                       # accuracy against examples, tied and untied, depth 0 and 3 left out: out/sft.png, half an hour
	$(MAKE) $(SIZES:%=data/sft/%/train.json) $(addsuffix /ckpt.pt,$(call seeds,$(TIED:%=untied_%)))
	$(MAKE) --jobs=2 $(foreach n,$(SIZES),$(patsubst out/toys/%,out/sft/$(n)/%/loss.png,$(call seeds,$(TAUGHT))))
	$(PY) nanodepth.py primitives $(call seeds,$(TAUGHT)) $(foreach n,$(SIZES),$(patsubst out/toys/%,out/sft/$(n)/%,$(call seeds,$(TAUGHT)))) --tasks=toy_code --depths=0,1,2,3 --n=500 --out=out/sft.png
data/sft/%/train.json: | .venv/ready
	$(PY) data/sft/prepare.py --n=$* --out=$(@D)
out/toys/untied_%/ckpt.pt: | .venv/ready
	$(PY) loop.py --untie out/toys/$* $(@D)
out/sft/%/loss.png: | .venv/ready
	@mkdir -p $(@D)
	OMP_NUM_THREADS=1 $(PY) train.py config/sft.py --data=data/sft/$(firstword $(subst /, ,$*)) --init_from=out/toys/$(notdir $*) --seed=$(lastword $(subst -, ,$*)) --out_dir=$(@D) 2>$(@D)/progress.txt || { tail -n 3 $(@D)/progress.txt; exit 1; }

hf: .venv/tests                 # the model of `make` as a Hugging Face folder: out/lidas_hf
	$(PY) nanodepth.py export out/lidas out/lidas_hf
evals: .venv/tests              # lm-eval on the toy's form of the primitives, no network: out/evals/lidas.json
	$(PY) nanodepth.py evaluate out/lidas --tasks=primitive_toy_copy,primitive_toy_assign_d0,primitive_toy_assign_d1,primitive_toy_assign_d2,primitive_toy_assign_d3

# ---- retrofitting: the baseline and LIDAS as recurrent models, trained on deeper chains: out/retro/NAME-SEED

CUT := baseline lidas
retrofit: toys                  # against the ordinary baseline going on with equal FLOPs: out/retrofit.png, 1 hour
	$(MAKE) data/toy_deep/train.json $(addsuffix /ckpt.pt,$(patsubst out/toys/%,out/cuts/%,$(call seeds,$(CUT))))
	$(MAKE) --jobs=2 $(addsuffix /loss.png,$(RETRO))
	$(PY) retrofit.py $(RETRO) --eval --r=1,2,3,4,6,8,16 --tasks=toy_assign/4,toy_assign/5 --show=loss,toy_assign/4,toy_assign/5 --out=out/retrofit.png
RETRO = $(foreach seed,$(SEEDS),$(foreach toy,$(CUT),out/retro/$(toy)-$(seed) out/retro/$(toy)_dense-$(seed)))
data/toy_deep/train.json: | .venv/ready
	$(PY) data/toy/prepare.py --depths=6 --out=data/toy_deep
out/cuts/%/ckpt.pt: | .venv/ready
	$(PY) retrofit.py out/toys/$* 2-2-2 --out=$(@D) --seed=$(lastword $(subst -, ,$*))
out/retro/%/loss.png: | .venv/ready
	@mkdir -p $(@D)
	OMP_NUM_THREADS=1 $(PY) train.py $(if $(findstring _dense,$*),config/retrofit_dense.py --init_from=out/toys/$(subst _dense,,$*),config/retrofit.py --init_from=out/cuts/$*) --seed=$(lastword $(subst -, ,$*)) --out_dir=$(@D) 2>$(@D)/progress.txt || { tail -n 3 $(@D)/progress.txt; exit 1; }

# ---- looping without training, and probes, on the toys

WRAPPED := baseline midas lidas loop_2x4 loop_4x2
SWEEP = $(PY) nanodepth.py sweep $(call seeds,$(WRAPPED)) --batches=6 --n=150 --tasks=toy_assign/4 --show=loss,toy_assign/4
sweeps: toys                    # where, how, and with which cache a frozen toy is looped: out/sweep_*.png, 1 hour
	$(SWEEP) --windows=all2,all4 --methods=naive,rk --K=2,3 --out=out/sweep_where.png
	$(SWEEP) --windows=all2,all4 --methods=naive,rk --K=2,3 --score=toy_assign/4 --out=out/sweep_where.png
	$(SWEEP) --windows=mid4 --methods=naive,euler,rk,midpoint,heun,rk4,heavy_ball,anderson,aitken,uniform,norm_stab,poly_blend --K=2 --out=out/sweep_how.png
	$(SWEEP) --windows=mid4 --methods=naive,rk --K=3 --cache=first,last,last_eval,none,frozen,exact --by_token --out=out/sweep_cache.png
probes: toys                    # which layers do they use: out/probe/index.html, 45 minutes
	$(PY) probe.py $(call seeds,$(WRAPPED)) --tasks=toy_assign/3

bench: .venv/tests              # speed and memory against transformers, a plain GPT and lm-eval: docs/bench.md, 25 minutes
	$(PY) nanodepth.py bench --out=docs/bench.md
gpu: .venv/tests                # the same questions for a GPU, at 360M, eager and compiled: docs/gpu.md
	$(PY) nanodepth.py gpu --out=docs/gpu.md
little: .venv/ready             # why naive looping explodes, on a network of a few neurons: out/wrapper_toy.png, seconds
	$(PY) wrapper.py --toy
diagrams: .venv/ready           # the README's diagrams, from the real orders and solvers: docs/assets, seconds
	$(PY) nanodepth.py diagrams
origins: .venv/ready            # which layer came from which: out/grow.png
	$(PY) grow.py 32 --block=4

.venv/tests: requirements-test.txt | .venv/ready     # transformers and lm-eval, which the tests compare with
	$(PY) -m pip install --quiet --disable-pip-version-check -r requirements-test.txt
	touch $@
test: .venv/tests               # every test, a worker a core: 3 minutes
	OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto
families: .venv/tests           # the wrapper and both exports on every family, in both forms of attention: a minute
	TORTURE=1 OMP_NUM_THREADS=1 $(PY) -m pytest -q -n auto tests/test_wrapper_hf.py tests/test_folders.py tests/test_ranks.py
torture: .venv/tests            # an attack on the code, for 45 minutes: docs/RELIABILITY.md says what it found
	$(PY) tests/torture.py --minutes=45
readme: .venv/tests             # every command of README.md and docs/CHECKPOINT.md in a fresh clone: half an hour
	$(PY) tests/readme.py
demo: data/toy/train.json       # the page of `play` with a grown model inside, for any browser: docs/demo.html, 3 to 6 minutes
	$(PY) train.py config/lidas.py --keep_stages=true --out_dir=out/demo
	$(PY) nanodepth.py play out/demo --export=docs/demo.html
browser: .venv/tests            # the page of `nanodepth.py play` in headless Chromium, which must be on the path: out/play/*.png
	$(PY) -m pip install --quiet --disable-pip-version-check playwright==1.65.2
	$(PY) tests/browser.py
planted: .venv/tests            # bugs planted one at a time, each of which a test must catch: 8 minutes
	$(PY) tests/planted.py

clean:                          # the data and the environment; out/ stays
	rm -rf .venv data/toy/*.bin data/toy/*.marks data/toy/*.mask data/toy/*.json
