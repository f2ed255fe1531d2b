"""A page on which a reader moves a model's depth, and sees at once what that does.

The idea: an order is a list, so it can be taken into the hands: blocks are moved, repeated and left
out, a window is looped; beside it stand the next tokens, plain and changed, what each layer would
answer, and how many questions are right. A toy is small enough for a browser, so the page is one
file that holds the model and needs neither Python nor a server. Its weights are kept as 8-bit
numbers with a scale for each row: nearly the model that was trained (`round_weights` gives just
that one). commands/play.js computes the forward pass of model.py.

Usage:
    nanodepth play out/lidas                      # out/play.html, and a browser opens it
    python train.py config/lidas.py --keep_stages=true      # with the models of 2, 4 and 6 layers
    nanodepth play out/lidas --out=docs/demo.html --open=false
"""
import base64
import json
import webbrowser
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.data.tokenizer import get_tokenizer, readable, start_of_document
from nanodepth.engine.checkpoint import build_model, exists, load, load_model
from nanodepth.engine.measure import parse_tasks
from nanodepth.grow import GROWTH

FOLDER = Path(__file__).parent
TASKS = 'toy_assign/0,toy_assign/1,toy_assign/2,toy_assign/3,toy_assign/4,toy_assign/5,toy_copy'
QUESTIONS = 100                         # of each task
MOST = 8 * 2 ** 20                      # bytes of the page
SHAPE = ('n_layer', 'n_embd', 'n_head', 'n_kv_head', 'head_dim', 'vocab_size', 'context',
         'rope_theta', 'norm_eps')

START_WORKERS = """
const read = id => document.getElementById(id).textContent;
const about = JSON.parse(read('about')), source = URL.createObjectURL(new Blob([read('worker')]));
const text = atob(read('weights')), bytes = new Uint8Array(text.length);
for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
about.at_once = Math.max(1, Math.min(4, (navigator.hardwareConcurrency || 2) - 1));
const waiting = new Map();
let asked = 0, turn = 0;
// one worker shows what is changed, the others count up the questions
const workers = Array.from({length: 1 + about.at_once}, () => {
  const worker = new Worker(source);
  worker.onmessage = ({data: {id, answer, error}}) => {
    const {done, failed} = waiting.get(id);
    waiting.delete(id);
    if (error === undefined) done(answer);
    else failed(Error(error));
  };
  worker.postMessage({name: 'begin', body: {about, raw: bytes.buffer}});
  return worker;
});
function ask(worker, name, body) {
  worker.postMessage({id: ++asked, name, body});
  return new Promise((done, failed) => waiting.set(asked, {done, failed}));
}
window.inside = (name, body) => name === 'measure'
  ? ask(workers[1 + turn++ % about.at_once], name, body) : ask(workers[0], name, body);
"""


def stages_of(run):
    """[(name, model, copies)] from shallow to deep: layer i began as layer copies[i] of the stage
    before; the first has None. Without the stages there is only the model as it is in the end."""
    state = load(run)
    model = build_model(state, run).eval()
    refuse(model, run)
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


def refuse(model, run):
    "A model that play.js cannot run."
    c = model.config
    for has, feature in ((model.recurs, 'a recurrent core'), (c.ln_scaling, 'ln_scaling'),
                         (c.rope_scaling, 'scaled rotary positions'), (c.qk_norm, 'qk_norm'),
                         (get_tokenizer(run).name != 'bytes', 'a tokenizer other than bytes')):
        if has:
            raise Refused(f'{run} has {feature}, which the page in a browser does not know '
                          '(commands/play.js): try nanodepth sample, loop or sweep')


def rounded(t):
    "(8-bit numbers, a scale for each row): their product is nearly the tensor, as a matrix."
    t = t.detach().float()
    rows = t.flatten(1) if t.dim() > 1 else t[None]
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
    return (rows / scale).round().to(torch.int8), scale


def round_weights(model):
    "The model, changed to what the page has: the tests compare the two."
    for p in model.parameters():
        numbers, scale = rounded(p)
        p.data = (numbers * scale).view_as(p)
    return model


def pack(models):
    "(bytes, {model: {tensor: its size, and where its numbers and scales begin}}) of {name: model}."
    raw = bytearray()
    places = {}

    def add(part):
        raw.extend(bytes(-len(raw) % 4))        # JavaScript reads floats at multiples of 4 bytes
        raw.extend(part.contiguous().numpy().tobytes())
        return len(raw) - part.nbytes

    for name, model in models.items():
        places[name] = {}
        for key, t in model.state_dict().items():
            numbers, scale = rounded(t)
            places[name][key] = dict(rows=len(numbers), columns=numbers.shape[1], at=add(numbers),
                                     scales=add(scale))
    return bytes(raw), places


def questions():
    "{'toy_assign/3': [{prompt, options, answer}]}"
    return {name: [asdict(example) for example in examples]
            for name, examples in parse_tasks(TASKS, QUESTIONS).items()}


def show_token(tokenizer, token):
    text = readable(tokenizer, [token])
    if not text:
        return '·'
    return text if text.isprintable() else repr(text)[1:-1]


def page(run, task, asked):
    "The page, as text; `asked` are the questions, and it begins with those of the task."
    tokenizer, stages = get_tokenizer(run), stages_of(run)
    raw, places = pack({name: model for name, model, _ in stages})
    models, kin = {}, None      # kin: the layer of the first stage that a layer goes back to
    for name, model, copies in stages:
        kin = [kin[i] for i in copies] if copies else [*range(len(model.layers))]
        models[name] = dict(path=str(run), layers=len(model.layers), order=model.order,
                            context=model.config.context, parameters=model.num_params(), r=None,
                            config={key: getattr(model.config, key) for key in SHAPE})
        if len(stages) > 1:
            models[name] |= dict(kin=kin, copies=copies)
    names = [*models]
    about = dict(models={name: models[name] for name in reversed(names)}, tensors=places,
                 stages=names if len(names) > 1 else None, families=max(kin) + 1,
                 methods=['naive', 'euler', 'rk'], caches=[], task=task,
                 tasks=['toy_assign', 'toy_copy'], start=start_of_document(tokenizer),
                 shown=[show_token(tokenizer, i) for i in range(tokenizer.n_vocab)],
                 questions=asked)
    scripts = (inside('application/json', 'about', json.dumps(about))
               + inside('text/plain', 'weights', base64.b64encode(raw).decode())
               + inside('text/plain', 'worker', (FOLDER / 'play.js').read_text(encoding='utf-8'))
               + '<script>{' + START_WORKERS + '}</script>\n')       # {}: its names are its own
    html = (FOLDER / 'play.html').read_text(encoding='utf-8')
    return html.replace('<script>\n', scripts + '<script>\n', 1)     # before the page's own


def inside(kind, name, text):
    "A text in the page, which the browser does not run. It must not end its own tag."
    return f'<script type="{kind}" id="{name}">' + text.replace('</', '<\\/') + '</script>\n'


@dataclass
class Options:
    WORDS = ['run']
    run: str                        # a folder that train.py wrote
    task: str = 'toy_assign/3'      # the questions to begin with, with their depth
    out: Path = Path('out/play.html')
    open: bool = True               # whether to open a browser


def main(argv=None):
    options = read(Options, argv, __doc__)
    asked = questions()
    check_choice('task', options.task, asked)
    text = page(options.run, options.task, asked).encode()
    if len(text) > MOST:
        raise Refused(f'{options.run} as a page would have {len(text) / 2 ** 20:.1f} MB, and '
                      f'{MOST / 2 ** 20:.0f} MB are the most, because it is for toys: try '
                      'nanodepth sample, loop or sweep')
    replace(options.out, text)
    print(f'{options.out}: {len(text) / 2 ** 20:.1f} MB, for any browser', flush=True)
    if options.open:
        webbrowser.open(options.out.resolve().as_uri())
