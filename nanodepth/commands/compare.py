"""Train each arm (a config or a line of train.py) with each seed, and say which differences so many
seeds resolve, at equal tokens and at equal FLOPs. If it is stopped, the same command goes on.
    nanodepth compare config/baseline.py config/own_growth.py --seeds=3 --tasks=toy_assign/0-3
    nanodepth compare config/compare_toy.py         # a file that gives `arms`: see docs/EXTEND.md
"""
import contextlib
import hashlib
import inspect
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace as replace_fields
from pathlib import Path
from typing import Literal

import torch
from tqdm import tqdm

from nanodepth import ROOT
from nanodepth.commands.arms import Arms, is_same
from nanodepth.common.errors import Refused, check_choice, say
from nanodepth.common.files import claim, replace
from nanodepth.train import config_file, in_steps, read
from nanodepth.models import checkpoint
from nanodepth.report.contrasts import MARGINS, Contrast, in_words
from nanodepth.report.logs import read_lines, read_log, without_compiling
from nanodepth.report.plot import draw_costs, show
from nanodepth.report.tables import as_csv, columns, read_csv, read_rows, where
from nanodepth.scoring.scores import Asked, Subject, parse_tasks
from nanodepth.scoring.way import Way, Ways, read_ways

PLAIN = str(Way())
# what a row says beside what was measured
FACTS = ('run', 'seed', 'way', 'lr', 'steps', 'tokens', 'flops', 'all_flops', 'seconds',
         'all_seconds', 'layers', 'parameters', 'val_loss', 'data', 'command', 'asked', 'commit',
         'torch', 'machine')


@dataclass(kw_only=True)
class Options(Ways, Asked):
    # two or more arms, each a config or, in quotes, a command line of train.py; all are compared
    # with the first. Or one file that gives `arms`
    lines: list[str]
    arms: dict[str, str] = field(default_factory=dict)      # {name: its line}
    ways: dict[str, list[str]] = field(default_factory=dict)    # {name: the ways it is asked in}
    against: dict[str, str] = field(default_factory=dict)   # {name: another arm than the first}
    metric: Callable | None = None      # (model, loader) gives {name: number} more of each model
    partners: bool = True       # for each arm the first one with its FLOPs
    # how many, or which, such as 4-7 (another call may train other seeds in the same folder)
    seeds: str = '3'
    rates: tuple[float, ...] = (1.0,)       # factors of each arm's own rate, tried with seed 0
    minutes: float | None = None        # no run begins that would end later
    threads: int | None = None  # of each process; None: as torch has it
    more: str = ''              # settings of every run
    measures: tuple[Literal['loss', 'text', 'log_prob'], ...] = ('loss', 'text', 'log_prob')
    # the measures in the tables; (): the loss, that on text alone, the last answers
    show: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()     # the arms in the picture; (): all
    out: Path = Path('out/compare')     # the folder of the runs
    rows: Path | None = None    # None: rows.csv there; what the logs measured is in rows_curves.csv
    picture: Path | None = None         # None: compare.png there


def read_options(argv):
    "The options. One word is a file that gives them, and the command line has the last say."
    options = read(Options, argv, ['lines'])
    if len(options.lines) == 1:
        [file] = options.lines
        values = config_file(file, typing.get_type_hints(Options))
        values.setdefault('out', Path('out') / Path(file).stem)
        named = {word.lstrip('-').partition('=')[0] for word in argv if word.startswith('-')}
        if options.more:
            values.pop('rows', None)    # a trial does not belong among the file's rows
        options = replace_fields(options, **{name: value for name, value in values.items()
                                             if name not in named})
        if not options.arms:
            raise Refused(f'{file} gives no arms: to compare two configs, name two')
    else:
        for line in options.lines:
            name = ' '.join(Path(word).stem if word.endswith('.py') else word
                            for word in line.split())
            if name in options.arms:
                raise Refused(f'{line}: is named twice')
            options.arms[name] = line
    options.rows = options.rows or options.out / 'rows.csv'
    options.picture = options.picture or options.out / 'compare.png'
    return options


def seeds_of(text):
    "'3' is 0, 1, 2, and '4-7' is 4, 5, 6, 7."
    match = re.fullmatch(r'(\d{1,4})(?:-(\d{1,4}))?', text)
    seeds = ()
    if match:
        first, last = (match[1], match[2]) if match[2] else (0, int(match[1]) - 1)
        seeds = range(int(first), int(last) + 1)
    if not seeds:
        raise Refused(f'--seeds={text} must be how many, such as 3, or which, such as 4-7')
    return seeds


# -------------------------------------------------------------------------------------- what is run

def start(words, said, threads, tell):
    """A command of ours in a process of its own, which writes into `said` what it says. Ctrl-C and
    SIGTERM end it at its step, and then this one. tell(): called now and then."""
    env = os.environ | (dict(OMP_NUM_THREADS=str(threads)) if threads else {})
    said.parent.mkdir(parents=True, exist_ok=True)
    with open(said, 'ab') as file:
        process = subprocess.Popen([sys.executable, '-m', 'nanodepth', *words], env=env,
                                   stdout=file, stderr=file, start_new_session=True)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=1)
                tell()
        except KeyboardInterrupt:
            process.terminate()
            process.wait()
            raise
    if process.returncode:
        lines = said.read_text(errors='replace').strip().splitlines() or ['']
        raise Refused(f'nanodepth {" ".join(words)} ended with status {process.returncode}: '
                      f'{lines[-1]} ({said} has all that it said)')


def commit():
    "What git says of this code; '' where there is no git."
    if not shutil.which('git'):
        return ''
    return subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=ROOT,
                          capture_output=True, text=True).stdout.strip()


def machine():
    if torch.cuda.is_available():
        return torch.cuda.get_device_name()
    return f'{platform.machine()} {torch.backends.cpu.get_cpu_capability()}'


def has_diverged(row):
    return row.get('val_loss') == math.inf


def text_of(value):
    "A value as a row has it: six digits are what a table needs."
    return f'{value:.6g}' if isinstance(value, float) else str(value)


def curves(log):
    "What was measured in training: the lines of a log with a measurement or another depth."
    for line in without_compiling(log):
        if not line.keys() & {'val_loss', 'grown', 'looped'}:
            continue
        row = {name: line[name] for name in ('step', 'tokens', 'flops', 'depth')}
        row['minutes'] = line['seconds'] / 60
        if 'val_loss' in line:
            row |= dict(loss=line['val_loss']) | {
                f'{kind} right': answers['accuracy'] for kind, answers in line['kinds'].items()
                if kind != 'text'}
        yield row


class Comparison:
    def __init__(self, options):
        self.options = o = options
        device = [] if o.device == 'auto' else [f'--device={o.device}']
        self.seeds = seeds_of(o.seeds)
        self.arms = Arms(o.arms, o.out, [*shlex.split(o.more), *device], o.partners)
        self.first = self.arms.trained()[0]
        for name in (*o.ways, *o.against, *o.against.values(), *o.drawn):
            check_choice('the arm', name, self.arms)
        self.ways = {name: [Way(), *read_ways(o)] for name in self.arms.trained()}
        for name, lines in o.ways.items():
            for line in lines:
                self.ways[name] += read_ways(read(Ways, shlex.split(line)))
        self.curves = o.rows.with_name(f'{o.rows.stem}_curves.csv')
        self.read()
        for row in self.rows:
            command = row.get('command', 'an unknown command')
            if row['run'] in self.arms and command != self.command(row['run']):
                raise Refused(f'{o.rows} has rows of {row["run"]} by {command!r}, and this is '
                              f'{self.command(row["run"])!r}: choose another --out or --rows')
        if len(o.rates) > 1 and 0 not in self.seeds and any(
                len(self.losses(name)) < len(o.rates) for name in self.arms.factors):
            raise Refused('the rates are tried with seed 0, which has not tried all yet')

    def command(self, name):
        "What is run, in words that are the same for every seed."
        flops = self.arms[name].flops
        words = [*self.arms[name].words, *self.arms.more]
        return ' '.join(words + [f'--flops={flops}'] if flops else words)

    def asked(self):
        "What every model is asked, in words."
        parts = []
        for each in fields(Asked):
            value = getattr(self.options, each.name)
            if each.name != 'device' and value != each.default:
                value = ','.join(map(str, value)) if isinstance(value, tuple) else value
                parts.append(f'--{each.name}={value}')
        if self.options.metric:
            source = inspect.getsource(self.options.metric)
            parts.append(f'metric {hashlib.sha256(source.encode()).hexdigest()[:12]}')
        return ' '.join(parts)

    # ------------------------------------------------------------------------------------ the rows

    def read(self):
        "The rows so far, also those of a call with other seeds, and the best rates by them."
        self.rows, rates = read_rows(self.options.rows), self.options.rates
        for name in self.arms.trained():
            if self.arms[name].root == name:
                losses = self.losses(name) if len(rates) > 1 else {}
                if len(losses) == len(rates) and min(losses.values()) == math.inf:
                    raise Refused(f'{name}: none of its rates could be trained')
                self.arms.factors[name] = min(losses, key=losses.get,
                                              default=1.0 if len(rates) > 1 else rates[0])

    def of_run(self, name, seed, factor=None):
        "The rows of an arm's seed, at its best rate or another one."
        if self.arms[name].command != 'train':
            return []
        factor = self.arms.factor(name) if factor is None else factor
        rate = float(text_of(factor * self.arms.config(name)[0].lr))
        return where(self.rows, run=name, seed=float(seed), lr=rate)

    def losses(self, name):
        "{factor: the loss} of the rates that seed 0 has tried; inf where it could not be trained."
        return {factor: row['val_loss'] for factor in self.options.rates
                for row in where(self.of_run(name, 0, factor), way=PLAIN)}

    def is_answered(self, name, seed, factor):
        "Are there rows of all that it is asked now?"
        rows = self.of_run(name, seed, factor)
        answered = {row['way'] for row in rows if row.get('asked') == self.asked()}
        return answered >= {*map(str, self.ways[name])} or any(map(has_diverged, rows))

    def jobs(self):
        "(arm, seed, factor of its rate) of all runs, in their order."
        for seed in self.seeds:
            for name, arm in self.arms.items():
                tries = seed == 0 and name in self.arms.factors
                for factor in self.options.rates if tries else [self.arms.factor(name)]:
                    yield name, seed, factor

    def left(self):
        "The jobs without rows, and those whose models these begin from."
        left, begun = [], set()
        for name, seed, factor in reversed([*self.jobs()]):
            awaited = (name, seed) in begun and factor == self.arms.factor(name)
            lacks_rows = self.arms[name].command == 'train' and not self.is_answered(
                name, seed, factor)
            if lacks_rows or awaited and not checkpoint.exists(self.arms.folder(name, seed)):
                left.append((name, seed, factor))
                begun |= {(other, seed) for other in self.arms[name].begins}
        return left[::-1]

    def add(self, path, new, *key):
        "Put rows into a file, where they replace those with the same key."
        place = {name: i for i, name in enumerate(self.arms)}
        new = [{name: text_of(value) for name, value in row.items()} for row in new]
        keys = {tuple(row[name] for name in key) for row in new}
        with claim(path.parent, wait=True):
            old = read_csv(path) if path.exists() else []
            rows = [row for row in old if tuple(row[name] for name in key) not in keys] + new
            rows.sort(key=lambda row: (float(row['seed']), place.get(row['run'], len(place))))
            replace(path, as_csv(rows))
        self.read()

    # ------------------------------------------------------------------------------------ the runs

    def run(self, name, seed, factor, tell):
        "Train a model and ask it."
        o, began = self.options, time.perf_counter()
        folder, command = self.arms.folder(name, seed, factor), self.arms[name].command
        argv = self.arms.argv(name, seed, factor)
        try:
            start([command, *argv], folder.with_name(f'{folder.name}.txt'), o.threads, tell)
            diverged = False
        except Refused as error:
            diverged = re.search('so it was not taken|weights are not finite', str(error))
            if not diverged:
                raise
            say(f'{folder.name} has diverged: {folder}.txt has all that it said')
        if command != 'train':
            return
        run = dict(run=name, seed=seed, lr=self.arms.config(name)[0].lr * factor)
        made = dict(command=self.command(name), asked=self.asked(), commit=commit(),
                    torch=torch.__version__, machine=machine())
        rows = [run | dict(way=PLAIN, val_loss=math.inf) | made]
        if not diverged:
            log = read_log(folder)
            self.add(self.curves, [run | row for row in curves(log)], 'run', 'seed', 'lr', 'step')
            facts = {each: log[-1][each] for each in ('tokens', 'flops', 'seconds', 'val_loss')}
            rows = [run | dict(way=way, steps=log[-1]['step']) | facts | measured | made
                    for way, measured in self.measured(folder, self.ways[name])]
        for row in rows:
            row['all_seconds'] = round(time.perf_counter() - began)
        self.add(o.rows, rows, 'run', 'seed', 'lr', 'way')

    def measured(self, folder, ways):
        "(way, {name: number}) of a model in some ways."
        subject = Subject(folder, self.options)
        subject.check(ways)
        layers = subject.model.layers
        same = dict(all_flops=checkpoint.cost_of(subject.state), layers=len(layers),
                    parameters=sum(p.numel() for p in layers.parameters()), data=subject.data())
        notes = folder.with_name(f'{folder.name}.jsonl')
        for way, scores in subject.noted(ways, notes).items():
            numbers = {name + ' right' * (score.kind == 'share'): score.mean
                       for name, score in scores.items()}
            if way == PLAIN:
                if self.options.metric:
                    with torch.no_grad():
                        more = self.options.metric(subject.model, subject.val)
                    numbers |= {name: float(value) for name, value in more.items()}
            yield way, same | numbers

    def cost(self, name, seed, factor):
        "FLOPs of a run, to tell the time that is left; 0 where they are not known yet."
        try:
            return float(self.arms.total(name, seed)) if self.arms[name].command == 'train' else 0.0
        except (Refused, OSError):
            return 0.0

    def run_all(self):
        end = time.monotonic() + 60 * (math.inf if self.options.minutes is None
                                       else self.options.minutes)
        busy, left = set(), self.left()
        for job in left:
            rows, folder = self.of_run(*job), self.arms.folder(*job)
            if rows and not self.is_answered(*job) and not checkpoint.exists(folder):
                raise Refused(f'{self.options.rows} has rows of {job[0]}, seed {job[1]}, which was '
                              f'asked something else, and {folder} is not here to be asked: choose '
                              'other --rows')
        form = '{desc}{percentage:.0f}%|{bar}| {elapsed}, {remaining} left'
        with tqdm(total=sum(self.cost(*job) for job in left), bar_format=form,
                  disable=not left) as bar:
            while left := self.left():
                waiting = {job[:2] for job in left}
                free = [(name, seed, factor) for name, seed, factor in left
                        if (name, seed, factor) not in busy
                        and not waiting & {(other, seed) for other in self.arms[name].begins}]
                if not free:
                    say(f'{len(left)} runs are at work in another call; the same command goes on')
                    break
                job, done = free[0], bar.n
                run = self.arms.folder(*job).name
                needs = self.seconds_of(job)
                if needs and needs > end - time.monotonic():
                    say(f'{run} would not end in time: the same command goes on with it')
                    break
                bar.set_description(f'runs left: {len(left)}, now {run}')

                def tell():
                    log = self.arms.folder(*job) / 'log.jsonl'
                    lines = read_lines(log) if log.exists() else []
                    bar.update(max(0, done + lines[-1]['flops'] - bar.n) if lines else 0)
                try:
                    with claim(self.options.out / '.at_work' / run):
                        self.run(*job, tell)
                except Refused as error:
                    if '.at_work' not in str(error):
                        raise
                    busy.add(job)       # another call's
                bar.update(max(0, done + self.cost(*job) - bar.n))

    def seconds_of(self, job):
        "How long a run will take, by the slowest so far on this machine; 0 before there is one."
        paces = [row['all_seconds'] / row['all_flops'] for row in where(
            self.rows, machine=machine()) if isinstance(row.get('all_seconds'), float)
            and not has_diverged(row)]
        return max(paces, default=0.0) * self.cost(*job)

    # ------------------------------------------------------------------------------ what is shown

    def beside(self, name, way, costs):
        "[(in words, arm)] that an arm in a way is compared with, by its (tokens, FLOPs)."
        if way != PLAIN:
            return [('as it is', name)]
        other = self.options.against.get(name, self.first)
        if name == other or other not in costs:
            return []
        tokens, flops = (is_same(a, b) for a, b in zip(costs[name], costs[other]))
        if self.arms[name].begins != self.arms[other].begins:
            tokens = False          # those of what one of them begins from are not counted
        pairs = []
        if tokens or flops:
            equal = ' and '.join(['equal tokens'] * tokens + ['equal FLOPs'] * flops)
            pairs.append((f'{other}, {equal}', other))
        partners = [run for run in costs if self.is_partner(run, other)]
        equal = [run for run in partners if is_same(costs[name][1], costs[run][1])]
        if name in partners:        # the same arm again
            return []
        if not flops and equal:
            pairs.append((f'{equal[0]}, equal FLOPs', equal[0]))
        return pairs

    def is_partner(self, name, other):
        "Is an arm another one with other FLOPs, and perhaps a cool-down of its own?"
        words = [word for word in self.arms[name].words if not word.startswith('--decay_steps=')]
        return self.arms[name].flops is not None and words == self.arms[other].words

    def print_tables(self):
        "For each measure a table: the means, and how they differ from others, seed by seed."
        rows = [row for name in self.arms.trained() for seed in self.seeds
                for row in self.of_run(name, seed)]
        good = [row for row in rows if not has_diverged(row)]
        if not good:
            return
        costs = {row['run']: (row['tokens'], row['all_flops']) for row in good}
        measures = [name for name in good[0] if name not in FACTS]
        answers = [name for name in measures if name.endswith(' right')]
        usual = [name for name in ('loss', 'text', *answers[-1:]) if name in measures]
        shown = self.options.show or usual or measures[:1]
        tasks = tuple(name for names in parse_tasks(self.options.tasks) for name in names)
        for name in shown:
            check_choice('--show', name, measures)
        compared = 0
        for measure in shown:
            lines = [['model', 'way', 'FLOPs', 'seeds', measure, 'compared with', 'difference',
                      'p', 'so many seeds say']]
            here = [row for row in good if isinstance(row.get(measure), float)]
            for name in self.arms.trained():
                for way in dict.fromkeys(row['way'] for row in where(here, run=name)):
                    its = where(here, run=name, way=way)
                    first = [name, way, f'{costs[name][1] / costs[self.first][1]:.0%}',
                             f'{len(its)}', spread(its, measure)]
                    for words, other in self.beside(name, way, costs) or [('', None)]:
                        others = [row for row in where(here, run=other, way=PLAIN)
                                  if row['data'] == its[0]['data'] or measure.startswith(tasks)]
                        lines.append(first + [words, *difference(its, others, measure)])
                        compared += bool(others)
                        first = [''] * len(first)
            if {line[1] for line in lines[1:]} <= {PLAIN, ''}:
                lines = [line[:1] + line[2:] for line in lines]
            print(columns(lines), end='\n\n')
        print('± is half of a 95% interval over the seeds, p is of the differences seed by seed, '
              f'FLOPs are a share of those of\n{self.first}. Comparisons made here: {compared}. '
              'p is not corrected for their number: of twenty without any\ndifference, one has a p '
              f'below 0.05 by chance.\nall {len(measures)} measures: {self.options.rows} '
              '(--show=NAME,... shows others)')
        for row in rows:
            if has_diverged(row):
                print(f'{row["run"]}, seed {row["seed"]:.0f}, has diverged, and is in no mean')
        rates = self.options.rates
        for name, factor in self.arms.factors.items() if len(rates) > 1 else ():
            end = ', an end of what was tried' * (factor in (min(rates), max(rates)))
            print(f'{name}: {factor:g} times its own rate was best{end}')

    def draw(self):
        "Loss and answers against what they cost; a partner is dashed, in its arm's colour."
        all_rows, rows, styles = read_rows(self.curves), [], {}
        for name in self.options.drawn or self.arms.trained():
            config = self.arms.config(name)[0]
            rate = float(text_of(self.arms.factor(name) * config.lr))
            for row in where(all_rows, run=name, lr=rate):
                # in the warm-up a growth is shown, and no loss
                if row['step'] < in_steps(config.warmup_steps, config.steps):
                    row.pop('loss', None)
                if row['seed'] in self.seeds:
                    rows.append(row)
            styles[name] = self.arms[name].root if self.arms[name].flops else name
        if rows:
            answers = [name for name in rows[0] if name.endswith(' right')]
            with claim(self.options.out, wait=True):
                show(self.options.picture, draw_costs, rows, ['loss', *answers[-1:]], styles)


def spread(rows, measure):
    "A mean and half of its interval, in words."
    factor, digits = (100, 1) if measure.endswith(' right') else (1, 3)
    c = Contrast([factor * row[measure] for row in rows], [0.0] * len(rows))
    return f'{c.mean:.{digits}f}' + (f' ± {c.half(0.95):.{digits}f}' if c.known else '')


def difference(rows, others, measure):
    "How far rows are from others of the same seeds, its p, and whether that is resolved."
    share = measure.endswith(' right')
    factor, digits = (100, 1) if share else (1, 3)
    margin = MARGINS['points' if share else 'answers' if measure.endswith(' log_prob') else 'text']
    of = {row['seed']: factor * row[measure] for row in others}
    both = [(factor * row[measure], of[row['seed']]) for row in rows if row['seed'] in of]
    if not both:
        return '', '', ''
    c = Contrast(*zip(*both))
    half = f' ± {c.half(0.95):.{digits}f}' if c.known else ''
    return f'{c.mean:+.{digits}f}{half}', f'{c.p:.2g}' if c.known else '', in_words(c, margin)


def main(argv=None):
    options = read_options(argv)
    if options.threads:
        torch.set_num_threads(options.threads)
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as Ctrl-C
    comparison = Comparison(options)
    comparison.run_all()
    comparison.print_tables()
    comparison.draw()
