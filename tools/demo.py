"""The page of `play` with a model inside: one file, without Python and without a server.

The idea: the toy is small enough for a browser. Its weights are kept as 8-bit numbers with a scale
for each row, so the page shows nearly the model that was trained (`rounded` gives that model back).
tools/play.js computes the same forward pass as model.py, and answers what play.py would.

Usage:
    python train.py config/lidas.py --keep_stages=true      # also keeps its 2, 4 and 6 layers
    python nanodepth.py play out/lidas --export=docs/demo.html
"""
import base64
import json
from dataclasses import asdict
from pathlib import Path

import torch

from common.errors import Refused
from common.files import replace
from data.tokenizer import get_tokenizer, readable, start_of_document
from engine.checkpoint import build_model, exists, load, load_model
from engine.measure import parse_tasks
from grow import GROWTH

FOLDER = Path(__file__).parent
TASKS = 'toy_assign/0,toy_assign/1,toy_assign/2,toy_assign/3,toy_assign/4,toy_assign/5,toy_copy'
QUESTIONS = 100                         # of each task, here and by the server
MOST = 8 * 2 ** 20                      # bytes of the page
SHAPE = ('n_layer', 'n_embd', 'n_head', 'n_kv_head', 'head_dim', 'vocab_size', 'context',
         'rope_theta', 'norm_eps')

ANSWER = """
const read = id => document.getElementById(id).textContent;
const about = JSON.parse(read('about')), source = URL.createObjectURL(new Blob([read('worker')]));
const text = atob(read('weights')), bytes = new Uint8Array(text.length);
for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
about.at_once = Math.max(1, Math.min(4, navigator.hardwareConcurrency - 1));
const waiting = new Map();
let asked = 0, turn = 0;
// one worker shows what is changed, the others count up the questions
const workers = Array.from({length: 1 + about.at_once}, () => {
  const worker = new Worker(source);
  worker.onmessage = ({data: {id, answer, error}}) => {
    const {done, failed} = waiting.get(id);
    waiting.delete(id);
    error === undefined ? done(answer) : failed(Error(error));
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
    "[(name, model, which layer of the stage before each of its layers copies, or None)]."
    state = load(run)
    model = build_model(state, run).eval()
    config = state.get('config') or {}
    refuse(model, run)
    grow, block = config.get('grow'), config.get('grow_block')
    sizes = [*range(block, len(model.layers), block)] if grow else []
    folders = [Path(run) / f'stage_{n}' for n in sizes]
    stages, copies = [], None
    if all(exists(folder) for folder in folders):       # else only the model as it is in the end
        for n, folder in zip(sizes, folders):
            stages.append((f'{n} layers', load_model(folder), copies))
            copies = GROWTH[grow](n, block)
    return [*stages, (f'{len(model.layers)} layers', model, copies)]


def refuse(model, run):
    c = model.config
    for lacks, what in ((model.recurs, 'a recurrent core'), (c.ln_scaling, 'ln_scaling'),
                        (c.rope_scaling, 'scaled rotary positions'), (c.qk_norm, 'qk_norm'),
                        (get_tokenizer(run).name != 'bytes', 'a tokenizer other than bytes')):
        if lacks:
            raise Refused(f'{run} has {what}, which the page in a browser does not know '
                          '(tools/play.js); python nanodepth.py play shows it from here')


def rounded(t):
    "(whole numbers, a scale for each row): their product is nearly the tensor (rows, columns)."
    rows = t.detach().float().reshape(len(t) if t.dim() > 1 else 1, -1)
    scale = (rows.abs().amax(dim=1, keepdim=True) / 127).clamp(min=1e-12)
    return (rows / scale).round().to(torch.int8), scale


def round_weights(model):
    "The model as the page has it."
    for p in model.parameters():
        numbers, scale = rounded(p)
        p.data = (numbers * scale).view_as(p)
    return model


def pack(models):
    "(bytes, {name: {tensor: where it is}}) of {name: model}."
    raw = bytearray()
    places = {}
    for name, model in models.items():
        places[name] = {}
        for key, t in model.state_dict().items():
            numbers, scale = rounded(t)
            place = dict(rows=len(numbers), columns=numbers.shape[1])
            for what, part in dict(at=numbers, scales=scale).items():
                raw += bytes(-len(raw) % 4)     # JavaScript reads numbers at their own multiples
                place[what] = len(raw)
                raw += part.contiguous().numpy().tobytes()
            places[name][key] = place
    return bytes(raw), places


def questions():
    "{'toy_assign/3': [{prompt, options, answer}]}: those that the server asks."
    return {name: [asdict(example) for example in examples]
            for name, examples in parse_tasks(TASKS, QUESTIONS).items()}


def show_token(tokenizer, token):
    text = readable(tokenizer, [token])
    return text if text.isprintable() and text else repr(text)[1:-1] or '·'


def page(run, task, asked):
    "The page, as text; `asked` are the questions, and it begins with those of the task."
    tokenizer, stages = get_tokenizer(run), stages_of(run)
    raw, places = pack({name: model for name, model, _ in stages})
    models, kin = {}, None
    for name, model, copies in stages:
        kin = [kin[i] for i in copies] if kin else [*range(len(model.layers))]
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
    inside = lambda kind, name, text: (f'<script type="{kind}" id="{name}">'
                                       + text.replace('</', '<\\/') + '</script>\n')
    scripts = (inside('application/json', 'about', json.dumps(about))
               + inside('text/plain', 'weights', base64.b64encode(raw).decode())
               + inside('text/plain', 'worker', (FOLDER / 'play.js').read_text(encoding='utf-8'))
               + f'<script>{{{ANSWER}}}</script>\n')
    html = (FOLDER / 'play.html').read_text(encoding='utf-8')
    return html.replace('<script>\n', scripts + '<script>\n', 1)


def write_page(runs, out, task):
    "python nanodepth.py play RUN --export=FILE"
    if len(runs) > 1:
        raise Refused(f'--export={out}: give one run, not {len(runs)}')
    [run] = runs
    asked = questions()
    if task not in asked:
        raise Refused(f'--task={task}: there are no questions; there are {", ".join(asked)}')
    text = page(run, task, asked).encode()
    if len(text) > MOST:
        raise Refused(f'{run} as a page would have {len(text) / 2 ** 20:.1f} MB, and '
                      f'{MOST / 2 ** 20:.0f} MB are the most: the page is for toys')
    replace(out, text)
    print(f'{out}: {len(text) / 2 ** 20:.1f} MB, to be opened in any browser')
