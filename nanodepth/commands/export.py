"""Write a checkpoint as a Hugging Face folder, or as a GGUF file for llama.cpp, as it is or in
another order. With one folder, print what it is.

Usage:
    nanodepth export out/lidas                # says what is in it
    nanodepth export out/lidas out/lidas_hf   # for transformers
    nanodepth export MODEL.gguf out/model     # of llama.cpp, for every other command
    nanodepth export out/smollm2 out/deeper --loop=8-4x2-18   # layers 8 to 11 twice
    nanodepth export out/smollm2 deeper.gguf --loop=13-4x2-13 --damp --dtype=q8_0
"""
import copy
import re
import shlex
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import torch
import yaml

from nanodepth.common.errors import Refused, refusing
from nanodepth.common.files import on_hub, refuse_not_new, replace
from nanodepth.common.options import read
from nanodepth.looping.layers import is_ours
from nanodepth.models.checkpoint import load_model
from nanodepth.models.gguf import open_gguf, save_opened
from nanodepth.models.hf import answer_of, save_hf, their_config
from nanodepth.models.hf_recurrent import save_raven
from nanodepth.retrofit import core_of
from nanodepth.scoring.way import Way, Ways, depth_in, name_of, read_way


@dataclass(kw_only=True)
class Options(Ways):
    WORDS = ['run', 'target']
    run: str                                # a folder that train.py wrote, or a Hugging Face one
    target: str | None = None               # the folder to write, or a file.gguf
    # of the weights; None: as they are
    dtype: Literal['float32', 'bfloat16', 'q8_0'] | None = None
    # of a recurrent model, which is written in the format of its authors: another first state in
    # each forward from now on
    fresh: bool = False


def main(argv):
    options = read(Options, argv, __doc__)
    way = read_way(options)
    if way.dials:
        raise Refused(f'{way}: a checkpoint holds layers and their order, and no code that loops a '
                      'window: from nanodepth import looped; --loop=... --damp comes near it')
    from_file, to_file = (str(path).endswith('.gguf') for path in (options.run, options.target))
    if options.dtype == 'q8_0' and not to_file:
        raise Refused(f'{options.target}: eight bits are for a file that ends in .gguf')
    if from_file and (to_file or str(way) != str(Way())):
        raise Refused(f'{options.run} is written as a folder, as it is; that folder takes another '
                      'order, and becomes a file')
    if options.target and not to_file:
        refuse_not_new(options.target)
    if from_file:
        model, words = open_gguf(options.run)
    else:
        model = load_model(options.run, others=not options.target)
    with way.apply(model):
        describe(options, model)
        if not options.target:
            return
        # a file is read back as 32 bits
        before = some_logits(copy.deepcopy(model).float() if to_file else model)
        if options.dtype in ('float32', 'bfloat16'):
            model.to(getattr(torch, options.dtype))
        if to_file:
            again = export_file(options, model)
        else:
            if from_file:
                save_opened(model, words, options.target)
            else:
                export(options, model)
                write_card(options, model, way, argv)
            again = load_model(options.target, others=True)
    compare(before, again, options.target, options.dtype)


@torch.no_grad()
def some_logits(model):
    "A model's logits after 16 tokens, drawn once and for all."
    config = answer_of(model).config
    n = min(16, config.context)
    tokens = torch.randint(config.vocab_size, (1, n), generator=torch.Generator().manual_seed(0))
    core = core_of(model) or SimpleNamespace(fresh=False)
    drawn, core.fresh = core.fresh, False           # with fresh noise no two forwards are equal
    logits = answer_of(model)(tokens).float()
    core.fresh = drawn
    return logits


def compare(before, again, target, dtype=None):
    """Say how far the model that was written is from the one that it was. In the same type it must
    be that model, or nothing is left of it."""
    after = some_logits(again)
    difference, largest = (after - before).abs().max(), before.abs().max()
    if dtype is None and not difference <= 1e-3 * largest:
        path = Path(target)
        (path if path.is_file() else path / 'config.json').unlink()
        raise Refused(f'{target}: opened again, it is another model (its logits differ by '
                      f'{difference:.2g}), so it is no checkpoint now')
    if dtype is None:
        print(f'{target} was opened again: the logits of {after.shape[1]} tokens differ by at most '
              f'{difference:.2g}, and the largest is {largest:.2g}')
    else:       # another type rounds otherwise: what is said stays the same, or nearly
        same = (after.argmax(-1) == before.argmax(-1)).float().mean()
        print(f'{target} was opened again, in {dtype}: of {after.shape[1]} likeliest next tokens '
              f'{same:.0%} are the same')


@torch.no_grad()
def compare_text(model, folder):
    """A recurrent folder brings code of its own, and what transformers hands to it differs between
    versions: a few of its likeliest tokens must be ours."""
    from transformers import AutoModelForCausalLM
    theirs = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype='auto')
    tokens = torch.randint(model.config.vocab_size, (1, 4),
                           generator=torch.Generator().manual_seed(0))
    some = min(8, model.config.context - 4)
    said = theirs.generate(tokens, attention_mask=torch.ones_like(tokens), do_sample=False,
                           max_new_tokens=some, min_new_tokens=some, pad_token_id=0)
    ours = model.to(next(theirs.parameters()).dtype).eval().generate(tokens, some, temperature=0)
    if not torch.equal(said, ours):
        (Path(folder) / 'config.json').unlink()
        raise Refused(f'{folder}: transformers writes other text with it than we do '
                      f'({said[0, 4:].tolist()}, not {ours[0, 4:].tolist()}), so it is no '
                      'checkpoint now: which version of transformers is this?')


def describe(options, model):
    "Print what a checkpoint is."
    if not is_ours(model):
        print(f'{options.run}: {type(model).__name__} of transformers, '
              f'{model.num_parameters():,} parameters, run {depth_in(model)} deep, {model.dtype}')
        return
    c = model.config
    print(f'{options.run}: {model.num_params():,} parameters, {len(model.layers)} layers of width '
          f'{c.n_embd} and {c.n_head} heads ({c.n_kv_head} of keys), run {len(model.unrolled())} '
          f'deep, context {c.context}, {str(model.norm.weight.dtype)[6:]}')
    if options.fresh and not core_of(model):
        raise Refused(f'--fresh is for a recurrent core, and {options.run} has none')


CARD = """---
{front}---
# {name}

This is `{parent}`, {what}. Nothing was trained for it. nanodepth has written it:

```sh
{command}
```

```python
from transformers import AutoModelForCausalLM, AutoTokenizer
model = AutoModelForCausalLM.from_pretrained({target!r}{trust})
tokenizer = AutoTokenizer.from_pretrained({target!r})
```

The licence is the parent's{licence}.
"""


def write_card(options, model, way, argv):
    "A README.md that says what the folder is, whose it is, and how to open it."
    core = core_of(model)
    what = (f'with a core of {len(core.items)} layers that runs r = {core.recurrence} times'
            if core else f'with its layers in the order {name_of(model.order)} (a number '
            'is that many layers, one after the other, and 4x2 are four that come twice)')
    if way.damp:
        what += ', where layers that run more than once add less each time'
    licence = licence_of(Path(options.run) / 'README.md')
    front = dict(library_name='transformers') | licence
    if on_hub(options.run):
        front['base_model'] = options.run
    text = CARD.format(
        front=yaml.safe_dump(front, sort_keys=False), name=plain(Path(options.target).name),
        parent=plain(options.run), what=what, target=str(options.target),
        licence=f', {plain(licence["license"])}' if licence else ', which its folder does not name',
        trust=', trust_remote_code=True' if core else '',
        command=plain(shlex.join(['nanodepth', 'export', *argv])))
    replace(Path(options.target) / 'README.md', text.encode())


def licence_of(card):
    "What the top of a model card says of its licence: {} if it is no YAML, or says nothing."
    text = card.read_text(encoding='utf-8', errors='replace') if card.is_file() else ''
    top = re.match(r'---\n(.*?)\n---(\n|$)', text, re.S)
    try:
        front = yaml.safe_load(top[1]) if top else {}
    except yaml.YAMLError:
        front = {}
    front = front if isinstance(front, dict) else {}
    said = {name: front[name] for name in ('license', 'license_name', 'license_link')
            if isinstance(front.get(name), str)}
    if isinstance(names := front.get('license'), list):
        said['license'] = ', '.join(name for name in names if isinstance(name, str))
    return said if said.get('license') else {}


def plain(text):
    "A text that ends no code and begins no tag in Markdown."
    return re.sub(r'[`<>\s]+', ' ', str(text))


def export(options, model):
    "A model of ours as a folder."
    about = dict(parent=str(options.run), order=' '.join(map(str, model.unrolled())))
    if core := core_of(model):
        core.fresh = core.fresh or options.fresh
        ours = save_raven(model, options.target, tokenizer=options.run, about=about)
        if not core.fresh:         # with fresh noise no two texts are equal
            compare_text(model, options.target)
        print(f"{options.target}: in the authors' format (huginn_raven); load_model opens it, and "
              'transformers with trust_remote_code=True (its tokenizer with False, too)')
        if ours:
            print(f"their own code does not know {', '.join(ours)}")
        return
    save_hf(model, options.target, tokenizer=options.run, about=about)
    print(f"{options.target}: {len(model.order)} layers of their own; "
          f"transformers.AutoModelForCausalLM.from_pretrained('{options.target}') opens it")


def export_file(options, model):
    "A model as a file for llama.cpp, and what is in the file."
    with refusing(ImportError, why=lambda error: 'nanodepth/extras, which writes GGUF files, is '
                  'not here'):
        from nanodepth.extras.gguf import read_loop, shared_stack, write_gguf
    dtype = options.dtype or str(model.norm.weight.dtype)[6:]
    write_gguf(model, options.target, dtype, options.run)
    stack, times = shared_stack(model)
    if times > 1:
        print(f'{options.target}: {len(stack)} layers that run {times} times with shared weights, '
              f'{dtype}, for a llama.cpp that knows nanbeige (since 2026)')
        return read_loop(options.target, model)
    print(f'{options.target}: {len(model.order)} layers of their own, {dtype}, for llama.cpp')
    if len({*model.order}) < len(model.order):
        print('(layers that run again are written again: llama.cpp shares the weights only of a '
              "whole stack of Llama's layers, such as --loop=30x2)")
    return open_gguf(options.target, their_config(model).rope_parameters)[0]
