"""A page on which a reader moves the depth of models, and sees at once what that does.

The idea: an order is a list, so it can be taken into the hands: layers are moved, repeated and left
out, a window is looped, a core runs more often; beside it stands what the model says. The page is
one file that holds the models and needs neither Python nor a server: toys and what they answer, or
one published model that reads whatever is typed. Their weights are kept as 8-bit numbers with a
scale for each row: nearly the models that were trained (`round_weights` gives just those).
commands/play.js computes their forward pass and cuts text into the checkpoint's tokens.

Usage:
    nanodepth play out/lidas                      # out/play_lidas.html, and a browser opens it
    python train.py config/lidas.py --keep_stages=true      # with the models of 2, 4 and 6 layers
    nanodepth play out/lidas out/retrofit --out=docs/demo.html --open=false
    nanodepth play out/smollm2 --out=out/play_smollm2.html  # a Hugging Face checkpoint: 190 MB
"""
import base64
import html
import itertools
import json
import webbrowser
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import read_json, replace
from nanodepth.common.options import read
from nanodepth.models.checkpoint import build_model, exists, load, load_model
from nanodepth.asking.scoring import parse_tasks, questions_of
from nanodepth.grow import GROWTH
from nanodepth.looping.layers import MIDDLE
from nanodepth.report.tables import run_names
from nanodepth.text.tokenizer import (get_tokenizer, readable, start_of_document,
                                      tokenizer_file)

FOLDER = Path(__file__).parent
MIDDLE_PLACES = {f'{depth},{n}': a for (depth, n), a in MIDDLE.items()}
# how GPT-2 and whoever says "ByteLevel" cuts a text
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TASKS = 'toy_assign/0,toy_assign/1,toy_assign/2,toy_assign/3,toy_assign/4,toy_assign/5,toy_copy'
QUESTIONS = 100                         # of each task
LARGEST = 20_000_000                    # parameters of a toy that a browser should carry,
LARGEST_CHECKPOINT = 200_000_000        # and of a published model
MOST = 12 * 2 ** 20                     # bytes of a page of toys
PART = 24 * 2 ** 20                     # bytes of weights that the page decodes at once
LONGEST = 512                           # tokens that the page lets a model read and write
SHAPE = ('n_layer', 'n_embd', 'n_head', 'n_kv_head', 'head_dim', 'vocab_size', 'context',
         'rope_theta', 'norm_eps', 'qk_norm')


def stages_of(run):
    """[(name, model, copies)] from shallow to deep: layer i began as layer copies[i] of the stage
    before; the first has None. Without the stages there is only the model as it is in the end."""
    state = load(run)
    model = build_model(state, run).eval()
    refuse(model, run, LARGEST)
    config = state.get('config') or {}
    stages = []
    copies = None
    depth = len(model.layers)
    if config.get('grow'):
        grow, block = GROWTH[config['grow']], config['grow_block']
        n = block
        while n < depth and exists(Path(run) / f'stage_{n}'):
            stages.append((f'{n} layers', load_model(Path(run) / f'stage_{n}'), copies))
            copies = grow(n, block)
            n = len(copies)
        if n < depth:           # not all were kept
            stages = []
            copies = None
    return [*stages, (f'{depth} layers', model, copies)]


def refuse(model, run, largest):
    "A model that a browser cannot carry, or play.js cannot run."
    c = model.config
    for has, feature in ((model.num_params() > largest, f'more than {largest:,} parameters'),
                         (c.ln_scaling, 'ln_scaling'),
                         (c.rope_scaling, 'scaled rotary positions')):
        if has:
            raise Refused(f'{run} has {feature}, which the page in a browser does not carry: try '
                          'nanodepth evaluate or sweep instead')


def tensors_of(model):
    "{name: tensor} of all that play.js reads: a recurrent model's first states too."
    tensors = dict(model.state_dict())
    if model.recurs:
        model.fresh = False                     # the page draws no noise
        with torch.no_grad():
            e = torch.zeros(1, model.config.context, model.config.n_embd)
            tensors['first_states'] = model.first_state(e, 0, None)[0].clone()
    return tensors


def rounded(t):
    "(8-bit numbers, a scale for each row): their product is nearly the tensor, as a matrix."
    t = t.detach().float()
    rows = t.flatten(1) if t.dim() > 1 else t[None]
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
    return (rows / scale).round().to(torch.int8), scale


def round_weights(model):
    "The model, changed to what the page has: the tests compare the two."
    states = tensors_of(model).get('first_states')
    for p in model.parameters():
        numbers, scale = rounded(p)
        p.data = (numbers * scale).view_as(p)
    if states is not None and model.state_std:
        numbers, scale = rounded(states)
        model.table = numbers * scale / model.state_std
    return model


def pack(model):
    """(bytes, {tensor: its size, and where its numbers and scales begin}). play.js takes sixteen
    numbers of a row at a time, so rows are filled up with zeros. A tied head is the embedding."""
    raw, places = bytearray(), {}

    def add(part):
        raw.extend(bytes(-len(raw) % 16))
        raw.extend(part.contiguous().numpy().tobytes())
        return len(raw) - part.nbytes

    for key, t in tensors_of(model).items():
        if key == 'head.weight' and model.head.weight is model.embed.weight:
            places[key] = places['embed.weight']
            continue
        numbers, scale = rounded(t)
        columns = numbers.shape[1]
        places[key] = dict(rows=len(numbers), columns=columns, scales=add(scale),
                           at=add(F.pad(numbers, (0, -columns % 16))))
    raw.extend(bytes(-len(raw) % 16))
    return bytes(raw), places


def questions():
    "{'toy_assign/3': [{prompt, options, answer}]}"
    return {name: [asdict(example) for example in examples]
            for name, examples in questions_of(parse_tasks(TASKS)[0], QUESTIONS).items()}


def show_token(tokenizer, token):
    text = readable(tokenizer, [token])
    if not text:
        return '·'
    return text if text.isprintable() else repr(text)[1:-1]


def described(run, model):
    "What the page says of a model, and what play.js needs to know of it."
    about = dict(layers=len(model.layers), order=model.order, parameters=model.num_params(),
                 run=str(run), kin=[*range(len(model.layers))],
                 config={key: getattr(model.config, key) for key in SHAPE})
    if model.recurs:
        about |= dict(r=model.mean, parts=[model.prelude, model.core, model.coda])
    return about


def page(runs, task, asked):
    "The page, as text; `asked` are the questions, and it begins with those of the task."
    tokenizer = get_tokenizer(runs[0])
    for run in runs:
        if get_tokenizer(run).name != 'bytes':
            raise Refused(f'{run} has a tokenizer other than bytes: it needs a page of its own')
    about = dict(models={}, tensors={}, runs=[], task=task, questions=asked,
                 middle=MIDDLE_PLACES,
                 start=start_of_document(tokenizer),
                 shown=[show_token(tokenizer, i) for i in range(tokenizer.n_vocab)])
    weights = {}
    for name, run in run_names(runs).items():
        keys = []
        kin = None                  # the layer of the first stage that a layer goes back to
        stages = stages_of(run)
        for label, model, copies in stages:
            key = name if model is stages[-1][1] else f'{name}, {label}'
            weights[key], about['tensors'][key] = pack(model)
            about['models'][key] = described(run, model)
            if copies:
                kin = [kin[i] for i in copies]
                about['models'][key] |= dict(kin=kin, copies=copies)
            kin = kin or [*range(len(model.layers))]
            keys.append(key)
        about['runs'].append(dict(name=name, stages=keys))
    return assembled('play.html', about, weights)


def page_of_checkpoint(run):
    "The page of one published model, as text."
    model = load_model(run).eval()
    refuse(model, run, LARGEST_CHECKPOINT)
    model.config.context = min(model.config.context, LONGEST)
    raw, places = pack(model)
    name = Path(run).name
    about = dict(models={name: described(run, model)}, tensors={name: places}, middle=MIDDLE_PLACES,
                 name=name, **tokenizer_of(run))
    return assembled('play_checkpoint.html', about, {name: raw})


def tokenizer_of(run):
    "A byte-level BPE, as play.js reads it; others are refused."
    path = tokenizer_file(run)
    spec = read_json(path)
    model = spec['model']
    cuts, unknown = [], []
    parts = spec['pre_tokenizer'] or {}
    for part in parts.get('pretokenizers', [parts]):
        if part.get('type') == 'Digits' and part['individual_digits']:
            cuts.append(r'\p{N}')
        elif part.get('type') == 'ByteLevel' and not part['add_prefix_space']:
            cuts += [GPT2_WORDS] * part['use_regex']
        elif part.get('type') == 'Split' and part['behavior'] == 'Isolated' and not part['invert']:
            cuts.append(part['pattern']['Regex'])
        else:
            unknown.append(part.get('type'))
    normalizer = (spec['normalizer'] or {}).get('type')
    if model['type'] != 'BPE' or model.get('byte_fallback') or unknown or normalizer not in (
            None, 'NFC'):
        raise Refused(f'{run} has a tokenizer that is no byte-level BPE, which the page in a '
                      'browser does not carry: try nanodepth evaluate or sweep instead')
    # JavaScript's \s is another set of characters, and it has no (?i: )
    for old, new in ((r'\s', r'\p{White_Space}'), (r'\S', r'\P{White_Space}'),
                     ("(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                      "(?:'[sSſ]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")):
        cuts = [cut.replace(old, new) for cut in cuts]
    vocab = [''] * (1 + max([*model['vocab'].values(), *(t['id'] for t in spec['added_tokens'])]))
    for text, i in model['vocab'].items():
        vocab[i] = text
    return dict(vocab=vocab, merges=[' '.join(pair) if isinstance(pair, list) else pair
                                     for pair in model['merges']],
                added={token['content']: token['id'] for token in spec['added_tokens']},
                splits=cuts, nfc=normalizer == 'NFC', whole=model.get('ignore_merges', False),
                start=start_of_document(get_tokenizer(run)))


def assembled(page, about, weights):
    """A page with what it needs inside: the style and the tiles that both pages share, the facts,
    the weights {model: bytes}, and the worker."""
    page_text, style, board, worker = ((FOLDER / name).read_text(encoding='utf-8') for name in
                                  (page, 'play.css', 'board.js', 'play.js'))
    places = itertools.accumulate(map(len, weights.values()), initial=0)
    about |= dict(begins=dict(zip(weights, places)), part=PART,
                  bytes=sum(map(len, weights.values())))
    parts = [inside('text/plain', f'weights of {name} {at}',
                    base64.b64encode(raw[at:at + PART]).decode())
             for name, raw in weights.items() for at in range(0, len(raw), PART)]
    page_text = page_text.replace('</style>', style + '</style>', 1)
    scripts = ''.join([inside('application/json', 'about', json.dumps(about)), *parts,
                       inside('text/plain', 'worker', worker)])
    # before the page's own
    return page_text.replace('<script>\n', scripts + '<script>\n' + board, 1)


def inside(kind, name, text):
    """A text in the page, which the browser does not run. What stands in it must not end its tag:
    in JSON no < is left, and nothing else has one that is not ours."""
    if kind == 'application/json':
        text = text.replace('<', '\\u003c')
    return f'<script type="{kind}" id="{html.escape(name)}">{text}</script>\n'


@dataclass
class Options:
    WORDS = ['runs']
    runs: list[str]                 # folders that train.py wrote, or one Hugging Face checkpoint
    task: str = 'toy_assign/3'      # the questions to begin with, with their depth
    out: Path | None = None         # None: out/play_NAME.html
    open: bool = True               # whether to open a browser


def main(argv=None):
    options = read(Options, argv, __doc__)
    if len(options.runs) == 1 and get_tokenizer(options.runs[0]).name != 'bytes':
        text = page_of_checkpoint(options.runs[0]).encode()
    else:
        asked = questions()
        check_choice('task', options.task, asked)
        text = page(options.runs, options.task, asked).encode()
        if len(text) > MOST:
            raise Refused(f'the page would have {len(text) / 2 ** 20:.1f} MB, and '
                          f'{MOST / 2 ** 20:.0f} MB are the most, because it is for toys: give '
                          'fewer runs, or try nanodepth evaluate or sweep instead')
    names = '_'.join(Path(run).name for run in options.runs)
    out = options.out or Path('out') / f'play_{names}.html'
    replace(out, text)
    print(f'{out}: {len(text) / 2 ** 20:.1f} MB, for any browser', flush=True)
    if options.open:
        webbrowser.open(out.resolve().as_uri())
