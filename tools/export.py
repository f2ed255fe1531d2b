"""Write a checkpoint as a Hugging Face folder, or print what it is.

Usage:
    python nanodepth.py export out/lidas out/lidas_hf  # with one folder it says what is in it
"""
from engine.checkpoint import load_model, set_depth
from engine.hf import save_hf
from engine.raven import save_raven
from retrofit import Recurrent
from tools.options import RUN, make_parser


def main(argv=None):
    parser = make_parser(
        __doc__, 'loop', fresh=(False, 'of a recurrent model, which is written in the format of '
                                'its authors: another first state in each forward from now on'))
    parser.add_argument('source', metavar='run', help=RUN)
    parser.add_argument('target', nargs='?', help='the folder to write')
    args = parser.parse_args(argv)
    model = set_depth(load_model(args.source), loop=args.loop)
    c, deep = model.config, len(model.order)
    print(f'{args.source}: {model.num_params():,} parameters, {len(model.layers)} layers of width '
          f'{c.n_embd} and {c.n_head} heads ({c.n_kv_head} of keys), run {deep} deep, context '
          f'{c.context}, {str(model.norm.weight.dtype)[6:]}')
    if args.target and isinstance(model, Recurrent):
        model.fresh = model.fresh or args.fresh
        save_raven(model, args.target, tokenizer=args.source)
        print(f"{args.target}: in the authors' format (huginn_raven); load_model opens it too")
    elif args.target:
        save_hf(model, args.target, tokenizer=args.source)
        print(f"{args.target}: {deep} layers of their own; "
              f"transformers.AutoModelForCausalLM.from_pretrained('{args.target}') opens it")
