"""A checkpoint as a Hugging Face folder, or what one holds.

Usage:
    python nanodepth.py export out/lidas out/lidas_hf  # with one folder it says what is in it
"""
import argparse

from engine.checkpoint import load_model, set_depth
from engine.hf import save_hf


def main(argv=None):
    parser = argparse.ArgumentParser(
        description='Write a checkpoint in the form of Hugging Face, or say what one holds.')
    parser.add_argument('source', help='a run of ours, a Hugging Face folder, or a name on its hub')
    parser.add_argument('target', nargs='?', help='the folder to write')
    parser.add_argument('--loop', help='with its layers in another order, such as 3-2x2-3')
    args = parser.parse_args(argv)
    model = load_model(args.source)
    set_depth(model, loop=args.loop)
    c = model.config
    print(f'{args.source}: {model.num_params():,} parameters, {len(model.layers)} '
          f'layers of width {c.n_embd} and {c.n_head} heads '
          f'({c.n_kv_head} of keys), run {len(model.order)} deep, context '
          f'{c.context}, {str(model.norm.weight.dtype)[6:]}')
    if args.target:
        save_hf(model, args.target, tokenizer=args.source)
        print(f"{args.target}: {len(model.order)} layers of their own; "
              f"transformers.AutoModelForCausalLM.from_pretrained('{args.target}') opens it")