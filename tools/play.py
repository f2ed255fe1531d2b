"""A page on which a reader moves a model's depth, and sees at once what that does.

The idea: an order is a list, so it can be taken into the hands: blocks are moved, repeated and left
out, a window is looped, a core runs more often; beside it stand the next tokens, plain and changed,
what each layer would answer, and slice by slice the loss and the questions. The standard
library's server on this machine's own address, one page without any library.

Usage:
    python nanodepth.py play out/lidas out/baseline         # opens a browser; --open=false does not
    python nanodepth.py play SmolLM-360M --port=8000 --task=assign_math/1
    python nanodepth.py play out/lidas --export=docs/demo.html      # one file that needs no server
"""
import contextlib
import functools
import json
import math
import re
import threading
import webbrowser
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import torch

from common.errors import Refused, check_choice
from common.fields import fill, fit_fields, within
from common.files import reading
from common.options import read, words
from data.primitives import TASKS, TOY_TASKS, few_shot, task_and_depth
from data.tokenizer import get_tokenizer
from engine.checkpoint import build_model, load
from engine.measure import Scorer, encode, open_data, parse_tasks
from engine.world import pick_device
from loop import fit_loop, format_loop, running
from model import check_order
from report.tables import run_names
from retrofit import Recurrent
from tools.demo import QUESTIONS, show_token, write_page
from variants.caches import CACHES
from wrapper import SOLVERS, patch, unpatch

PAGE = Path(__file__).with_name('play.html')
MOST = 200              # layers of an order, and recurrences; evaluations: four times as many
BODY = 2 ** 16          # bytes of a request
BATCHES, SLICE = 4, 20      # what is measured: a batch or SLICE questions a request
SHOWN = 16              # tokens of a prompt in the table of layers


@dataclass
class Options:
    runs: list[str] = words()           # folders that train.py wrote, or Hugging Face checkpoints
    task: str = 'toy_assign/3'          # the questions to begin with, with their depth
    data: str | None = None             # a dataset; None: what the run was trained on
    port: int = 8000                    # on 127.0.0.1; 0: any that is free
    open: bool = True                   # whether to open a browser
    device: str = 'auto'                # auto: cuda, else mps, else cpu
    export: Path | None = None          # write the page with a toy's model inside, and end


@dataclass
class Wrap:
    "The wrapper's dials; what is left out or empty is the wrapper's own."
    window: str = None
    method: str = None
    K: int = within(1, 16, default=None)
    T: float = None
    beta: float = None
    cache: str = None


@dataclass
class Request:
    model: str = None
    how: dict | None = None         # order, r, wrap: what differs from the model as it is
    prompt: str = ''
    task: str | None = None
    text: str = ''                  # an order, as a notation or by layer numbers
    seed: int = within(1, 10 ** 6, default=1)
    slice: int = within(0, 1000, default=0)         # of what is measured


@dataclass
class How:
    order: list[int] | None = None
    r: int | None = None
    wrap: dict | None = None


class Opened:
    "A checkpoint, and what was found out about it. Patches are global: one request at a time."

    def __init__(self, path, device, data=None):
        self.path = path
        self.state = load(path)
        self.lock = threading.Lock()
        self.model = build_model(self.state, path).to(device).eval()
        self.tokenizer = get_tokenizer(path)
        self.device = device
        self.plain = self.model.order
        self.mean = getattr(self.model, 'mean', 1)
        config = self.state.get('config') or {}
        self.data = data
        self.has_data = bool(data or config.get('data'))
        self.pieces = config.get('grad_accum', 1)

    @functools.cached_property
    def val(self):
        return open_data(self.path, self.state, self.model, self.data)

    def about(self):
        model = self.model
        recurrent = isinstance(self.model, Recurrent)
        return dict(path=str(self.path), layers=len(model.layers), order=self.plain,
                    context=model.config.context, parameters=model.num_params(),
                    r=self.mean if recurrent else None,
                    parts=[model.prelude, model.core, model.coda] if recurrent else None)

    @contextlib.contextmanager
    def as_asked(self, how):
        """Lock the model and put it into the state asked for: yields it, and how many layers one
        forward evaluates. Undone at the end."""
        model = self.model
        how = fill(How, how, 'the request')
        order = check_order(how.order or self.plain, len(model.layers))
        r = self.mean if how.r is None else how.r
        if not 1 <= r <= MOST:
            raise Refused(f'r={r} must be a whole number, 1 to {MOST}')
        with self.lock:
            if isinstance(model, Recurrent):
                model.mean = r
                try:
                    if len(model.order) > 4 * MOST:
                        raise Refused(f'{len(model.order)} evaluations are more than this page '
                                      'runs')
                    yield model, len(model.order)
                finally:
                    model.mean = self.mean
                return
            if len(order) > MOST:
                raise Refused(f'{len(order)} layers are more than this page runs ({MOST})')
            with running(model, order):
                layers = len(order)
                try:
                    if how.wrap:
                        given = {k: v for k, v in how.wrap.items() if v not in (None, '')}
                        handle = patch(model, **fit_fields(Wrap, given, 'the request'))
                        a, b = handle.window
                        layers += (handle.evaluations - 1) * (b - a + 1)
                    if layers > 4 * MOST:
                        raise Refused(f'{layers} evaluations are more than this page runs')
                    yield model, layers
                finally:
                    unpatch(model)

    def tokens(self, prompt):
        ids = encode(self.tokenizer, prompt, self.model)
        context = self.model.config.context
        if not 0 < len(ids) <= context:
            raise Refused(f'the prompt has {len(ids)} tokens, 1 to {context} fit')
        return torch.tensor([ids], device=self.device)

    def look(self, how, prompt):
        "What the model says next, and what it would say behind every layer that it evaluates."
        tokens = self.tokens(prompt)
        answers = {}
        for name, state in dict(plain={}, changed=how).items():
            with self.as_asked(state) as (model, layers), torch.inference_mode():
                streams = []

                def tap(depth, part, x, update):
                    if part == 'mlp':
                        streams.append((depth, x[:, -SHOWN:] + update[:, -SHOWN:]))
                    return update
                stream = model.hidden(tokens, tap=tap)
                last = self.likely(stream[:, -1:], 8)[0]
                order = model.order
                behind = [dict(depth=depth, layer=order[depth],
                               says=[one[0] for one in self.likely(x, 1)])
                          for depth, x in streams]
                answers[name] = dict(next=last, behind=behind, layers=layers, order=order)
        changed = answers['changed']
        with contextlib.suppress(Refused):
            changed['notation'] = format_loop(changed['order'])
        return answers | dict(prompt=[self.show(i) for i in tokens[0, -SHOWN:].tolist()],
                              cost=changed['layers'] / answers['plain']['layers'])

    def measure(self, how, task, i):
        """Slice i of a state's skill: the loss of a batch, or the answers to some questions. The
        page asks for one after the other, adds them up, and stops when its order changes."""
        if ',' in task:
            raise Refused(f'task={task}: one task at a time')
        examples = parse_tasks(task, QUESTIONS)[task]
        batches = min(BATCHES, len(self.val)) if self.has_data else 0
        of = batches + QUESTIONS // SLICE
        if i >= of:
            raise Refused(f'slice={i} must be below {of}')
        with self.as_asked(how) as (model, _):
            if i < batches:
                targets = (self.val.batch(i)[1] != -1).sum().item()
                loss, _ = Scorer(self.tokenizer, {}, self.val, 1, i, self.pieces).on_data(model)
                return dict(of=of, loss=loss * targets, targets=targets)
            some = slice((i - batches) * SLICE, (i - batches + 1) * SLICE)
            answers = Scorer(self.tokenizer, {task: examples}).answers(model, some)[task]
            if math.isnan(answers.right):
                raise Refused('the log-likelihoods of the answers are not finite')
            return dict(of=of, right=answers.right, questions=answers.n)

    def likely(self, stream, k):
        "The k likeliest next tokens behind each place of a stream: [[(text, probability)]]."
        best = self.model.head(self.model.norm(stream)).float().softmax(-1)[0].topk(k)
        return [[(self.show(i), round(p, 4)) for i, p in zip(*pair)]
                for pair in zip(best.indices.tolist(), best.values.tolist())]

    def show(self, token):
        return show_token(self.tokenizer, token)


class Play:
    "What the page may ask, by name."

    def __init__(self, opened, task):
        self.opened, self.task = opened, task

    def about(self, _):
        return dict(models={name: s.about() for name, s in self.opened.items()},
                    methods=list(SOLVERS), caches=list(CACHES), task=self.task,
                    tasks=[*TASKS, *TOY_TASKS])

    def one(self, request):
        check_choice('model', request.model, tuple(self.opened))
        return self.opened[request.model]

    def order(self, request):
        "A notation, or layers by number, as an order."
        n = len(self.one(request).model.layers)
        text = request.text[:1000]
        if ',' in text or ' ' in text.strip():
            parts = text.replace(',', ' ').split()
            return dict(order=check_order([int(p) if p.isdecimal() else p for p in parts], n))
        return dict(order=fit_loop(text, n))

    def look(self, request):
        return self.one(request).look(request.how or {}, request.prompt)

    def measure(self, request):
        return self.one(request).measure(request.how or {}, request.task or self.task,
                                         request.slice)

    def question(self, request):
        task, depth = task_and_depth(request.task or self.task)
        example = few_shot(task, 1, shots=0, depth=depth, seed=request.seed)[0]
        return dict(prompt=example.prompt, answer=example.options[example.answer],
                    options=example.options)


ASKED = 'about', 'order', 'look', 'measure', 'question'        # what of Play a request may name


class Handler(BaseHTTPRequestHandler):
    timeout = 20            # a connection that asks nothing is closed

    def do_GET(self):
        self.respond(lambda: PAGE.read_bytes() if self.path.partition('?')[0] == '/' else None)

    def do_POST(self):
        name = self.path[1:]
        self.respond(lambda: getattr(self.server.play, name)(self.body()) if name in ASKED
                     else None)

    def respond(self, compute):
        # Against a page of somebody else's that gives this address a name of its own (DNS
        # rebinding): only this machine's names. Any port, since it may be forwarded.
        for header in 'Host', 'Origin':
            host = self.headers.get(header, 'localhost').removeprefix('http://')
            if not re.fullmatch(r'(localhost|127\.0\.0\.1)(:\d+)?', host):
                return self.answer(403, dict(error='this page is for this machine alone'))
        try:
            reply = compute()
        except Refused as error:
            return self.answer(400, dict(error=str(error).splitlines()[0][:300]))
        if reply is None:
            return self.answer(404, dict(error='there is nothing here'))
        self.answer(200, reply)

    def body(self):
        size = self.headers.get('Content-Length', '')
        if not size.isdecimal() or len(size) > 9 or int(size) > BODY:
            raise Refused(f'a request has at most {BODY:,} bytes')
        with reading('the request'):
            request = json.loads(self.rfile.read(int(size)))
        return fill(Request, request, 'the request')

    def answer(self, code, reply):
        page = isinstance(reply, bytes)
        raw = reply if page else json.dumps(reply).encode()
        self.send_response(code)
        for name, value in {
                'Content-Type': 'text/html; charset=utf-8' if page else 'application/json',
                'Content-Length': len(raw), 'Content-Security-Policy':
                "default-src 'self' 'unsafe-inline'; img-src data:"}.items():
            self.send_header(name, str(value))
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.wfile.write(raw)

    def log_message(self, *_):
        pass


class Server(ThreadingHTTPServer):
    "Waits for what is at work in a model before it ends: Python must not end inside of torch."
    daemon_threads, request_queue_size, play = True, 64, None

    def server_close(self):
        super().server_close()
        if self.play:
            for one in self.play.opened.values():
                one.lock.acquire(timeout=10)


def serve(paths, task, port, device='auto', data=None):
    "The server, bound to this machine's own address; its serve_forever answers."
    if len(parse_tasks(task, 1)) != 1:
        raise Refused(f'--task={task}: give one task, such as toy_assign/3')
    try:
        server = Server(('127.0.0.1', port), Handler)
    except OSError as error:
        raise Refused(f'the port {port} cannot be used ({error.strerror}): choose another --port, '
                      'or --port=0 for any that is free') from None
    try:
        device = pick_device(device)
        opened = {name: Opened(path, device, data) for name, path in run_names(paths).items()}
    except BaseException:
        server.server_close()
        raise
    server.play = Play(opened, task)
    return server


def main(argv=None):
    options = read(Options, argv, __doc__)
    if options.export:
        return write_page(options.runs, options.export, options.task)
    with serve(options.runs, options.task, options.port, options.device,
               options.data) as server:
        address = f'http://127.0.0.1:{server.server_address[1]}/'
        print(f'{address} (Ctrl-C ends it)', flush=True)
        if options.open:
            webbrowser.open(address)
        server.serve_forever()
