"""Train a tuned lens for a checkpoint, and say what is known at each depth.

Usage:
    python nanodepth.py lens out/baseline               # saved as out/baseline/lens.pt
"""
from pathlib import Path

from common.columns import columns
from common.errors import Refused
from engine.checkpoint import build_model, load
from engine.measure import After, open_data
from engine.world import pick_device
from tools.options import RUN, make_parser
from variants.lens import beside, quality, save_lens, train_lens


def main(argv=None):
    parser = make_parser(__doc__, 'data', 'device', steps=(250, 'training steps'),
                         lr=(1e-3, "Adam's rate"),
                         out=(Path, 'the lens (default: lens.pt beside the checkpoint)'))
    parser.add_argument('path', metavar='run', help=RUN)
    args = parser.parse_args(argv)
    out = args.out or beside(args.path)
    if out.is_dir() or out.name == 'ckpt.pt':
        raise Refused(f'--out={out} is {"a folder" if out.is_dir() else "a checkpoint"}: the lens '
                      'is a file of its own')
    state, device = load(args.path), pick_device(args.device)
    model = build_model(state, args.path).to(device).eval()
    val = open_data(args.path, state, model, args.data, 'val', longest=512, seed=1)
    # rows that the model was not trained on; the first ones are to measure by
    lens = train_lens(model, After(val, 8), args.steps, args.lr, progress=True)
    if not all(p.isfinite().all() for p in lens.parameters()):
        raise Refused(f'the lens is not finite after {args.steps} steps: lower --lr={args.lr:g}')
    save_lens(lens, model, out)
    tokens = val.batch(0)[0].to(device)
    (plain, seen), (tuned, known) = (quality(model, x, tokens) for x in (None, lens))
    rows = [['behind layer', 'KL, logit lens', 'KL, tuned lens', 'top 5, logit lens',
             'top 5, tuned lens']]
    rows += [[str(d), f'{plain[d]:.3f}', f'{tuned[d]:.3f}', f'{seen[d]:.1%}', f'{known[d]:.1%}']
             for d in range(len(plain))]
    print(columns(rows))
    print(f'lens: {out}')
