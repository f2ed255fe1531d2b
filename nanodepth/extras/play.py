"""Write a page on which a reader moves the layers of toy models, and sees their answers at once.
The page is one file that needs neither Python nor a server, because extras/model.js computes the
forward pass.
    nanodepth play out/lidas                # writes out/play_lidas.html, and a browser opens it
"""
import base64
import json
import webbrowser
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from nanodepth.common.errors import check_choice
from nanodepth.common.files import replace
from nanodepth.common.options import read
from nanodepth.model import Pass, require, spans_in, unrolled
from nanodepth.models.authors import parts_of
from nanodepth.models.checkpoint import load_model, open_path, state_of
from nanodepth.models.hf import beyond
from nanodepth.report.logs import log_of
from nanodepth.report.tables import run_names
from nanodepth.retrofit import Core, core_of
from nanodepth.scoring.data import parse_tasks, questions_of
from nanodepth.text.tokenizer import get_tokenizer, readable, start_of_document

FOLDER = Path(__file__).parent
TASKS = 'toy_assign/0-5'                # each option of these is one byte
QUESTIONS = 100                         # of each task
LARGEST = 20_000_000                    # parameters that a browser should carry
SHAPE = ('n_layer', 'n_embd', 'n_head', 'n_kv_head', 'head_dim', 'vocab_size', 'context',
         'rope_theta', 'norm_eps')


def stages_of(run):
    """Return [(file, model, copies), ...] for the stages of a run that were kept, from shallow to
    deep. Layer i of a stage began as a copy of layer copies[i] of the stage before. The first stage
    has copies=None."""
    state, model = open_path(run)
    kept = {}           # {number of layers: the last file with this many}
    for path in sorted(Path(run).glob('ckpt-*.pt'), key=lambda path: state_of(path)['step']):
        kept[state_of(path)['model_config']['n_layer']] = path
    lines = log_of(run) if kept and state['config'].get('grow') else []
    stages, copies = [], None
    for order in (line['grown']['origin'] for line in lines if 'grown' in line):
        if file := kept.get(1 + max(order)):
            stages.append((file, load_model(file), copies if stages else None))
            copies = None
        copies = [copies[i] for i in order] if copies else order
    return [*stages, (run, model, copies if stages else None)]


def tensors_of(model):
    "Return {name: tensor} of everything that model.js reads, including a core's first states."
    tensors = dict(model.state_dict())
    if core := core_of(model):
        e = torch.zeros(1, model.config.context, model.config.n_embd)
        tensors['first_states'] = core.first_state(Pass(model, e.shape[1]), e)[0]
    return tensors


def rounded(t):
    """Return a scale for each row of a tensor, and its numbers in eight bits. A vector is a matrix
    of one column."""
    rows = t.detach().float().reshape(-1, t.shape[-1] if t.dim() > 1 else 1)
    scales = rows.abs().amax(1, keepdim=True).clamp(min=1e-30) / 127
    return scales, (rows / scales).round().to(torch.int8)


def pack(model):
    "Return all weights as bytes, and {tensor: its rows, its columns, and where it begins}."
    raw, places = bytearray(), {}
    for name, t in tensors_of(model).items():
        if name == 'head.weight' and model.config.tie_embeddings:
            places[name] = places['embed.weight']
            continue
        raw.extend(bytes(-len(raw) % 4))
        scales, numbers = rounded(t)
        places[name] = dict(rows=len(numbers), columns=numbers.shape[1], at=len(raw))
        raw.extend(scales.numpy().tobytes() + numbers.numpy().tobytes())
    return bytes(raw), places


def refuse(run, model):
    "Refuse a model that model.js cannot run, or that is too large for a browser."
    more = beyond(model.config) or [s for s in spans_in(model.order) if not isinstance(s, Core)]
    require(not (more or model.config.rope_scaling) and model.num_params() <= LARGEST,
            f'{run} is not a plain toy with at most {LARGEST:,} parameters, and the page can only '
            'have such models')


def described(run, model, kin, copies, places):
    """Return what the page and model.js need to know of a model. `kin` is, for each layer, the
    layer of the first stage from which it was copied."""
    about = dict(layers=len(model.layers), order=unrolled(model.order), run=str(run), kin=kin,
                 copies=copies, parameters=model.num_params(), tensors=places,
                 config={key: getattr(model.config, key) for key in SHAPE})
    if core := core_of(model):
        about |= dict(r=core.r, parts=list(parts_of(model)))
    return about


def page(runs, task):
    "Return the page, as text, of runs that read bytes. It begins with the questions of the task."
    questions = questions_of(parse_tasks(TASKS)[0], QUESTIONS)
    check_choice('task', task, questions)
    tokenizer = get_tokenizer('bytes')
    about = dict(
        models={}, weights={}, runs=[], task=task, start=start_of_document(tokenizer),
        shown=[shown if (shown := readable(tokenizer, [i])).isprintable() else repr(shown)[1:-1]
               for i in range(tokenizer.n_vocab)],
        questions={name: [asdict(each) for each in some] for name, some in questions.items()})
    for name, run in run_names(runs).items():
        require(get_tokenizer(run).name == 'bytes', f'{run} does not read bytes, as toys do')
        keys, kin = [], None
        for path, model, copies in stages_of(run):
            refuse(path, model)
            key = name if path == run else f'{name}, {len(model.layers)} layers'
            kin = [kin[i] for i in copies] if copies else [*range(len(model.layers))]
            raw, places = pack(model)
            about['weights'][key] = base64.b64encode(raw).decode()
            about['models'][key] = described(path, model, kin, copies, places)
            keys.append(key)
        about['runs'].append(dict(name=name, stages=keys))
    parts = {name: (FOLDER / name).read_text(encoding='utf-8')
             for name in ('play.html', 'play.css', 'page.js', 'model.js')}
    # inside a script no text may look like the script's end
    parts['about'] = json.dumps(about).replace('<', '\\u003c')
    text = parts.pop('play.html')
    for name, part in parts.items():
        text = text.replace(f'/* {name} */', part)
    return text


@dataclass
class Options:
    # folders that train.py wrote (with --keep_stages=true they have their smaller models, too)
    runs: list[str]
    task: str = 'toy_assign/3'      # the questions to begin with, with their depth
    out: Path | None = None         # None: out/play_NAME.html
    open: bool = True               # whether to open a browser


def main(argv=None):
    options = read(Options, argv, ['runs'])
    text = page(options.runs, options.task).encode()
    names = '_'.join(Path(run).name for run in options.runs)
    out = options.out or Path('out') / f'play_{names}.html'
    replace(out, text)
    print(f'{out}: {len(text) / 2 ** 20:.1f} MB, for any browser')
    if options.open:
        webbrowser.open(out.resolve().as_uri())
