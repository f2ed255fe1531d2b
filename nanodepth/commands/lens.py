"""Train a tuned lens for a checkpoint, and say what is known at each depth.

Usage:
    nanodepth lens out/baseline               # saved as out/baseline/lens.pt
"""
from dataclasses import dataclass
from pathlib import Path

from nanodepth.common.columns import columns
from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.engine.checkpoint import build_model, load
from nanodepth.engine.measure import After, open_data
from nanodepth.engine.world import pick_device
from nanodepth.variants.lens import beside, quality, save_lens, train_lens


@dataclass
class Options:
    WORDS = ['run']
    run: str               # a folder that train.py wrote, or a Hugging Face checkpoint
    data: str | None = None         # a dataset; None: what the run was trained on
    steps: int = 250                # training steps
    lr: float = 1e-3                # Adam's rate
    device: str = 'auto'            # auto: cuda, else mps, else cpu
    out: Path | None = None         # the lens; None: lens.pt beside the checkpoint


def main(argv=None):
    options = read(Options, argv, __doc__)
    out = options.out or beside(options.run)
    if out.is_dir() or out.name == 'ckpt.pt':
        raise Refused(f'--out={out} is {"a folder" if out.is_dir() else "a checkpoint"}: the lens '
                      'is a file of its own')
    state = load(options.run)
    device = pick_device(options.device)
    model = build_model(state, options.run).to(device).eval()
    val = open_data(options.run, state, model, options.data, seed=1)
    # rows that the model was not trained on; the first ones are to measure by
    lens = train_lens(model, After(val, 8), options.steps, options.lr, progress=True)
    if not all(p.isfinite().all() for p in lens.parameters()):
        raise Refused(f'the lens is not finite after {options.steps} steps: lower '
                      f'--lr={options.lr:g}')
    save_lens(lens, model, out)
    tokens = val.batch(0)[0].to(device)
    (plain, seen), (tuned, known) = (quality(model, x, tokens) for x in (None, lens))
    rows = [['behind layer', 'KL, logit lens', 'KL, tuned lens', 'top 5, logit lens',
             'top 5, tuned lens']]
    rows += [[str(d), f'{plain[d]:.3f}', f'{tuned[d]:.3f}', f'{seen[d]:.1%}', f'{known[d]:.1%}']
             for d in range(len(plain))]
    print(columns(rows))
    print(f'lens: {out}')
