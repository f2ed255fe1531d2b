"""A page on which a reader moves the layers of models, and sees at once what they answer. It is one
file that needs neither Python nor a server, because extras/play.js computes the forward pass.
    nanodepth play out/lidas                # writes out/play_lidas.html, and a browser opens it
"""
import base64
import copy
import html
import itertools
import json
import math
import re
import webbrowser
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import read_json, replace
from nanodepth.common.options import read
from nanodepth.model import Pass, spans_in, unrolled
from nanodepth.models.checkpoint import kind_of, load_model, open_path, state_of
from nanodepth.report.logs import log_of
from nanodepth.report.tables import run_names
from nanodepth.models.authors import parts_of
from nanodepth.retrofit import Core, core_of
from nanodepth.scoring.likelihoods import encode
from nanodepth.scoring.data import parse_tasks, questions_of
from nanodepth.text.tokenizer import (as_tokenizers, get_tokenizer, readable, start_of_document,
                                      tokenizer_file)

FOLDER = Path(__file__).parent
MIDDLE_PLACES = {'36,4': 15}        # as pick_window in wrapper.py
# how GPT-2 and whoever says "ByteLevel" cuts a text
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
TASKS = 'toy_assign/0-5'                # of which each option is one byte
QUESTIONS = 100                         # of each task
LARGEST = 20_000_000                    # parameters of a toy that a browser should carry,
LARGEST_CHECKPOINT = 200_000_000        # and of a published model
PART = 6 * 2 ** 20                      # bytes of weights that the page decodes at once
BLOCK = 32                              # weights that share a scale
LONGEST = 512                           # tokens that the page lets a model read and write
SHAPE = ('n_layer', 'n_embd', 'n_head', 'n_kv_head', 'head_dim', 'vocab_size', 'context',
         'rope_theta', 'norm_eps', 'qk_norm')


def stages_of(run):
    """[(its file, model, copies)] from shallow to deep: layer i began as layer copies[i] of the
    stage before; the first has None. Without the stages there is only the model as it is in the
    end."""
    state, model = open_path(run)
    model.eval()
    config = state.get('config') or {}
    stages = []
    copies = None
    if config.get('grow') and (Path(run) / 'log.jsonl').exists():
        kept = kept_stages(run, state)
        orders = [line['grown']['origin'] for line in log_of(run) if 'grown' in line]
        n = config.get('grow_from') or config['grow_block']
        for order in orders:
            if n in kept:
                stages.append((kept[n], load_model(kept[n]), copies))
            copies, n = order, len(order)
        if len(stages) < len(orders):           # not all were kept
            stages = []
            copies = None
    return [*stages, (run, model, copies)]


def kept_stages(run, state):
    """{layers: the last checkpoint of so many that was kept of a run, and not of another that has
    lain in its folder}."""
    def made(state):
        config = state.get('config') or {}
        return [*map(config.get, ('seed', 'init_from', 'n_embd')), state.get('data')]
    kept = [(state_of(path), path) for path in Path(run).glob('ckpt-*.pt')]
    kept.sort(key=lambda each: each[0]['step'])
    return {each['model_config']['n_layer']: path for each, path in kept
            if made(each) == made(state)}


def refuse(model, run, largest):
    "A model that a browser cannot carry, or play.js cannot run."
    c = model.config
    spans = [type(span).__name__ for span in spans_in(model.order) if type(span) is not Core]
    for has, feature in ((model.num_params() > largest, f'more than {largest:,} parameters'),
                         (spans, f'a {", ".join(spans)} in its order'),
                         (c.ln_scaling, 'ln_scaling'),
                         (c.rope_scaling, 'scaled rotary positions')):
        if has:
            raise Refused(f'{run} has {feature}, which the page in a browser does not carry: try '
                          'nanodepth evaluate or sweep instead')


def tensors_of(model):
    "{name: tensor} of all that play.js reads: a recurrent model's first states too."
    tensors = dict(model.state_dict())
    if core := core_of(model):
        core.fresh = False                      # the page draws no noise
        with torch.no_grad():
            e = torch.zeros(1, model.config.context, model.config.n_embd)
            run = Pass(model, model.config.context)
            tensors['first_states'] = core.first_state(run, e)[0].clone()
    return tensors


def rounded(t, bits):
    """(whole numbers, scales, minima) of a matrix, in blocks of 32 of a row, as GGUF's Q8_0 and
    Q4_1 have them: a weight is nearly number * scale + minimum, with no minimum in 8 bits."""
    blocks = F.pad(t.detach().float(), (0, -t.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    if bits == 8:
        minima, most, least = None, 127, -127
        span = blocks.abs().amax(-1)
        shifted = blocks
    else:
        minima, most, least = blocks.amin(-1).half(), 15, 0
        span = blocks.amax(-1) - blocks.amin(-1)
        shifted = blocks - minima[..., None].float()
    scales = (span / most).clamp(min=2 ** -24).half()
    return (shifted / scales[..., None].float()).round().clamp(least, most), scales, minima


def bits_of(key, t, small):
    "Vectors stay as they are; of a published model the layers' matrices take four bits."
    if t.dim() == 1:
        return 32
    return 4 if small and key.startswith('layers.') else 8


def widened(t, bits):
    "A tensor as the page has it."
    if bits == 32:
        return t.detach().float()
    numbers, scales, minima = rounded(t, bits)
    blocks = numbers * scales[..., None].float()
    if minima is not None:
        blocks += minima[..., None].float()
    return blocks.flatten(1)[:, :t.shape[1]]


def round_weights(model, small=False):
    "The model, changed to what the page has."
    states = tensors_of(model).get('first_states')
    for key, p in model.named_parameters():
        p.data = widened(p, bits_of(key, p, small))
    core = core_of(model)
    if states is not None:
        states = widened(states, 8)
        core.first_state = lambda run, e: states[run.start:run.start + e.shape[1]].expand_as(e)
    return model


def pack(model, small=False):
    """(bytes, {tensor: its size, its bits, and where its numbers, scales and minima begin}). A
    tied head is the embedding."""
    raw, places = bytearray(), {}

    def add(part):
        raw.extend(bytes(-len(raw) % 16))
        raw.extend(part.contiguous().numpy().tobytes())
        return len(raw) - part.nbytes

    for key, t in tensors_of(model).items():
        if key == 'head.weight' and model.head.weight is model.embed.weight:
            places[key] = places['embed.weight']
            continue
        bits = bits_of(key, t, small)
        place = dict(rows=t.shape[0] if t.dim() > 1 else 1, columns=t.shape[-1], bits=bits)
        if bits == 32:
            place['at'] = add(t.detach().float())
        else:
            numbers, scales, minima = rounded(t, bits)
            place['scales'] = add(scales)
            if bits == 8:
                place['at'] = add(numbers.to(torch.int8))
            else:               # a byte has one number of the block's first half, one of its second
                first, second = numbers.to(torch.uint8).chunk(2, dim=-1)
                place |= dict(minima=add(minima), at=add(first + 16 * second))
        places[key] = place
    raw.extend(bytes(-len(raw) % 16))
    return bytes(raw), places


def scales_of(places):
    "How many scales and minima play.js widens to floats."
    return sum(place['rows'] * math.ceil(place['columns'] / BLOCK) * (1 + ('minima' in place))
               for place in places.values() if 'scales' in place)


def show_token(tokenizer, token):
    text = readable(tokenizer, [token])
    if not text:
        return '·'
    return text if text.isprintable() else repr(text)[1:-1]


def described(run, model, kin, copies):
    """What the page says of a model, and what play.js needs to know of it. kin: the layer of the
    first stage that each layer goes back to."""
    about = dict(layers=len(model.layers), order=unrolled(model.order), run=str(run), kin=kin,
                 copies=copies, parameters=model.num_params(),
                 config={key: getattr(model.config, key) for key in SHAPE})
    if core := core_of(model):
        about |= dict(r=core.r, parts=list(parts_of(model)))
    return about


def page(runs, **about):
    """The page, as text. `about` is what it is given beside its models: the questions of toys, or
    what a published model needs."""
    toys = 'questions' in about
    about |= dict(models={}, tensors={}, runs=[], middle=MIDDLE_PLACES)
    weights = {}
    for name, run in run_names(runs).items():
        keys = []
        kin = None
        for path, model, copies in stages_of(run):
            refuse(model, run, LARGEST if toys else LARGEST_CHECKPOINT)
            if not toys:
                model.float().config.context = min(model.config.context, LONGEST)
                about['agreed'] = agreed(model, run)
            key = name if path == run else f'{name}, {len(model.layers)} layers'
            weights[key], about['tensors'][key] = pack(model, small=not toys)
            kin = [kin[i] for i in copies] if copies else [*range(len(model.layers))]
            about['models'][key] = described(path, model, kin, copies)
            keys.append(key)
        about['runs'].append(dict(name=name, stages=keys))
    return assembled(about, weights)


def page_of_toys(runs, task):
    "The page of runs that read bytes; it begins with the questions of the task."
    asked = {name: [asdict(example) for example in examples]
             for name, examples in questions_of(parse_tasks(TASKS)[0], QUESTIONS).items()}
    check_choice('task', task, asked)
    tokenizer = get_tokenizer(runs[0])
    for run in runs:
        if get_tokenizer(run).name != 'bytes':
            raise Refused(f'{run} has a tokenizer other than bytes: it needs a page of its own')
    return page(runs, task=task, questions=asked, start=start_of_document(tokenizer),
                shown=[show_token(tokenizer, i) for i in range(tokenizer.n_vocab)])


def page_of_checkpoint(run):
    "The page of one published model."
    return page([run], **tokenizer_of(run),
                rounding='4 bits in the layers and 8 in the embedding, in blocks of 32')


@torch.no_grad()
def agreed(model, run):
    """(how often the rounded model's first token is the model's own, of how many beginnings): 16
    tokens of each topic of Python's language reference, which is on every machine."""
    from pydoc_data.topics import topics
    tokenizer = get_tokenizer(run)
    texts = [encode(tokenizer, text) for text in topics.values()]
    tokens = torch.tensor([text[:16] for text in texts if len(text) >= 16][:100])
    said = model(tokens)[:, -1].argmax(-1)
    rounded = round_weights(copy.deepcopy(model), small=True)
    return (rounded(tokens)[:, -1].argmax(-1) == said).sum().item(), len(tokens)


def tokenizer_of(run):
    "A byte-level BPE, as play.js reads it; others are refused."
    path = tokenizer_file(run)          # (one that tiktoken knows has none)
    own = get_tokenizer(run)
    spec = read_json(path) if path else json.loads(as_tokenizers(own, run).to_str())
    model = spec['model']
    cuts, unknown = [], []
    parts = spec['pre_tokenizer'] or {}
    for part in parts.get('pretokenizers', [parts]):
        if part.get('type') == 'Digits' and part['individual_digits']:
            cuts.append(r'\p{N}')
        elif part.get('type') == 'ByteLevel' and not part['add_prefix_space']:
            cuts += [GPT2_WORDS] * part.get('use_regex', True)
        elif part.get('type') == 'Split' and part['behavior'] == 'Isolated' and not part['invert']:
            cuts.append(part['pattern']['Regex'])
        else:
            unknown.append(part.get('type'))
    normalizer = (spec['normalizer'] or {}).get('type')
    strips = any(t[how] for t in spec['added_tokens']
                 for how in ('lstrip', 'rstrip', 'single_word'))
    if (model['type'] != 'BPE' or model.get('byte_fallback') or unknown or strips
            or normalizer not in (None, 'NFC')):
        raise Refused(f'{run} has a tokenizer that is no byte-level BPE, which the page in a '
                      'browser does not carry: try nanodepth evaluate or sweep instead')
    cuts = [for_javascript(cut, run) for cut in cuts]
    vocab = [''] * (1 + max([*model['vocab'].values(), *(t['id'] for t in spec['added_tokens'])]))
    for text, i in model['vocab'].items():
        vocab[i] = text
    return dict(vocab=vocab, merges=[' '.join(pair) if isinstance(pair, list) else pair
                                     for pair in model['merges']],
                added={token['content']: token['id'] for token in spec['added_tokens']},
                splits=cuts, nfc=normalizer == 'NFC', whole=model.get('ignore_merges', False),
                start=start_of_document(own))


# what JavaScript takes behind a backslash
ESCAPED = r'\\[pP]\{([LMNPSZC][a-z]?|White_Space)\}|\\[nrtvf0^$.*+?()[\]{}|/\\-]'


def for_javascript(cut, run):
    """A pattern of a tokenizer as JavaScript reads it, which has other words for some and none for
    others."""
    # its \s is another set of characters, and not every browser has (?i: )
    for old, new in ((r'\s', r'\p{White_Space}'), (r'\S', r'\P{White_Space}'),
                     ("(?i:'s|'t|'re|'ve|'m|'ll|'d)",
                      "(?:'[sSſ]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])")):
        cut = cut.replace(old, new)
    bare = re.sub(ESCAPED, 'x', cut)
    odd = lambda of: '\\' in of[0] or '[' in of[0][1:] or '&&' in of[0]
    bare = re.sub(r'\[[^]]*\]', lambda of: of[0] if odd(of) else 'x', bare)
    if re.search(r'[?*+}]\+|\(\?(?![:=!]|<[=!])|\\|\[', bare):
        raise Refused(f'{run} cuts text by the pattern {cut!r}, which the page in a browser does '
                      'not carry: try nanodepth evaluate or sweep instead')
    return cut


def assembled(about, weights):
    """The page with what it needs inside: the style, the tiles, the facts, the weights {model:
    bytes}, and the worker."""
    page_text, style, board, worker = ((FOLDER / name).read_text(encoding='utf-8') for name in
                                       ('play.html', 'play.css', 'board.js', 'play.js'))
    places = itertools.accumulate(map(len, weights.values()), initial=0)
    about |= dict(begins=dict(zip(weights, places)), part=PART,
                  lengths={name: len(raw) for name, raw in weights.items()},
                  bytes=sum(map(len, weights.values())),
                  scales=sum(map(scales_of, about['tensors'].values())))
    parts = [inside('text/plain', f'weights of {name} {at}',
                    base64.b64encode(raw[at:at + PART]).decode())
             for name, raw in weights.items() for at in range(0, len(raw), PART)]
    page_text = page_text.replace('<style>\n', '<style>\n' + style, 1)
    scripts = ''.join([inside('application/json', 'about', json.dumps(about)), *parts,
                       inside('text/plain', 'worker', worker)])
    return page_text.replace('<script>\n', scripts + '<script>\n' + board, 1)


def inside(kind, name, text):
    """A text in the page, which the browser does not run. What stands in it must not end its tag:
    in JSON no < is left, and nothing else has one that is not ours."""
    if kind == 'application/json':
        text = text.replace('<', '\\u003c')
    return f'<script type="{kind}" id="{html.escape(name)}">{text}</script>\n'


@dataclass
class Options:
    # folders that train.py wrote (with --keep_stages=true, their smaller models are on the page
    # too), or one Hugging Face checkpoint
    runs: list[str]
    task: str = 'toy_assign/3'      # the questions to begin with, with their depth
    out: Path | None = None         # None: out/play_NAME.html
    open: bool = True               # whether to open a browser


def main(argv=None):
    options = read(Options, argv, ['runs'])
    for run in options.runs:
        kind_of(run)            # a line, if there is none
    names = '_'.join(Path(run).name for run in options.runs)
    toys = len(options.runs) > 1 or get_tokenizer(options.runs[0]).name == 'bytes'
    if toys:
        text = page_of_toys(options.runs, options.task).encode()
    else:
        text = page_of_checkpoint(options.runs[0]).encode()
    out = options.out or Path('out') / f'play_{names}.html'
    if out.suffix != '.html':
        raise Refused(f'--out={out}: a page is a file .html')
    replace(out, text)
    print(f'{out}: {len(text) / 2 ** 20:.1f} MB, for any browser', flush=True)
    if toys:
        print(f'next: nanodepth evaluate {options.runs[0]} --measures= --tasks=toy_assign/0-4 '
              'counts right answers', flush=True)
    if options.open:
        webbrowser.open(out.resolve().as_uri())
