"""Write a checkpoint as a Hugging Face folder, or print what it is.

Usage:
    python nanodepth.py export out/lidas out/lidas_hf  # with one folder it says what is in it
"""
from dataclasses import dataclass

from common.options import read, word
from engine.checkpoint import load_model
from engine.hf import save_hf
from engine.measure import set_depth
from engine.raven import save_raven
from retrofit import Recurrent


@dataclass
class Options:
    run: str = word()                       # a folder that train.py wrote, or a Hugging Face one
    target: str | None = word(default=None)         # the folder to write
    loop: str | None = None                 # run the layers in another order, such as 3-2x2-3
    # of a recurrent model, which is written in the format of its authors: another first state in
    # each forward from now on
    fresh: bool = False


def main(argv=None):
    options = read(Options, argv, __doc__)
    model = set_depth(load_model(options.run), loop=options.loop)
    c, deep = model.config, len(model.order)
    print(f'{options.run}: {model.num_params():,} parameters, {len(model.layers)} layers of width '
          f'{c.n_embd} and {c.n_head} heads ({c.n_kv_head} of keys), run {deep} deep, context '
          f'{c.context}, {str(model.norm.weight.dtype)[6:]}')
    if options.target and isinstance(model, Recurrent):
        model.fresh = model.fresh or options.fresh
        save_raven(model, options.target, tokenizer=options.run)
        print(f"{options.target}: in the authors' format (huginn_raven); load_model opens it too")
    elif options.target:
        save_hf(model, options.target, tokenizer=options.run)
        print(f"{options.target}: {deep} layers of their own; "
              f"transformers.AutoModelForCausalLM.from_pretrained('{options.target}') opens it")
