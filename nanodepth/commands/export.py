"""Write a checkpoint as a Hugging Face folder: as it is, in another order, or looped by the
wrapper. With one folder, print what it is.

Usage:
    nanodepth export out/lidas                # says what is in it
    nanodepth export out/lidas out/lidas_hf   # for transformers
    nanodepth export SmolLM-360M out/deeper --loop=8-4x2-20   # layers 8 to 11 twice
    nanodepth export SmolLM-360M out/looped --window=mid4 --K=3       # with the wrapper
"""
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec

from nanodepth.common.errors import Refused
from nanodepth.common.options import read
from nanodepth.data.tokenizer import local_folder
from nanodepth.engine.checkpoint import is_hugging_face, load_model
from nanodepth.engine.folders import save_looped, save_reordered, without_weights
from nanodepth.engine.foreign import is_foreign
from nanodepth.engine.hf import save_hf
from nanodepth.engine.raven import save_raven
from nanodepth.engine.ways import Ways, read_way
from nanodepth.retrofit import Recurrent
from nanodepth.variants.hosts import depth_of


@dataclass(kw_only=True)
class Options(Ways):
    WORDS = ['run', 'target']
    run: str                                # a folder that train.py wrote, or a Hugging Face one
    target: str | None = None               # the folder to write
    # of a recurrent model, which is written in the format of its authors: another first state in
    # each forward from now on
    fresh: bool = False


def main(argv=None):
    options = read(Options, argv, __doc__)
    way = read_way(options)
    if way.dials and not options.target:
        raise Refused(f'{way} is for an export: give the folder to write, too')
    if way.dials:
        return export_looped(options, way.dials)
    # without transformers a Llama's order is written by our own code
    reorders = way.loop and is_hugging_face(options.run) and find_spec('transformers')
    if reorders or is_foreign(options.run):
        return export_theirs(options, way)
    with way.apply(load_model(options.run)) as model:
        export_ours(options, model)


def export_ours(options, model):
    c = model.config
    deep = len(model.order)
    print(f'{options.run}: {model.num_params():,} parameters, {len(model.layers)} layers of width '
          f'{c.n_embd} and {c.n_head} heads ({c.n_kv_head} of keys), run {deep} deep, context '
          f'{c.context}, {str(model.norm.weight.dtype)[6:]}')
    if options.target and isinstance(model, Recurrent):
        model.fresh = model.fresh or options.fresh
        ours = save_raven(model, options.target, tokenizer=options.run)
        print(f"{options.target}: in the authors' format (huginn_raven); load_model opens it, and "
              'transformers with trust_remote_code=True')
        if ours:
            print(f"their own code does not know {', '.join(ours)}")
    elif options.fresh:
        raise Refused(f'--fresh is for a recurrent core, and {options.run} has none')
    elif options.target:
        save_hf(model, options.target, tokenizer=options.run)
        print(f"{options.target}: {deep} layers of their own; "
              f"transformers.AutoModelForCausalLM.from_pretrained('{options.target}') opens it")


def export_theirs(options, way):
    "A checkpoint of any family: what it is, or its layers in another order."
    model = without_weights(local_folder(options.run))
    n = len(depth_of(model)[0])
    parameters = sum(p.numel() for p in model.parameters())
    if way.r is not None:
        with way.apply(model):      # refused: it has no core
            pass
    order = way.order(n) if way.loop else [*range(n)]
    print(f'{options.run}: a {type(model).__name__} of {n} layers, {parameters:,} parameters, '
          f'run {len(order)} deep')
    if options.target and not way.loop:
        raise Refused(f'{options.run} is a Hugging Face checkpoint already: give --loop or '
                      '--window, as it is to be written')
    if options.target:
        save_reordered(options.run, options.target, order)
        print(f'{options.target}: {len(order)} layers of their own, and whatever opens '
              f'{options.run} opens this')


def export_looped(options, settings):
    "The checkpoint with its middle looped; a run of ours is written as Hugging Face's first."
    run, target = options.run, options.target
    if is_hugging_face(run):
        save_looped(run, target, **settings)
    else:
        with tempfile.TemporaryDirectory() as folder:
            save_hf(load_model(run), f'{folder}/hf', tokenizer=run)
            save_looped(f'{folder}/hf', target, called=run, **settings)
    print(f"{target}: transformers.AutoModelForCausalLM.from_pretrained('{target}', "
          'trust_remote_code=True) opens it; without that word it is the plain model')
