"""Train each arm (a config or a line of train.py) with each seed, and say which differences so many
seeds resolve, at equal tokens and at equal training FLOPs. Nothing is kept but the runs: the same
command goes on where it was stopped, and an edited config is another run in another folder.
    nanodepth compare config/baseline.py config/own_growth.py --seeds=3 --tasks=toy_assign/0-3
    nanodepth compare docs/results/compare_toy.py   # a file that gives `arms`: see docs/EXTEND.md
"""
import contextlib
import io
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

import nanodepth
from nanodepth.commands import cut, evaluate
from nanodepth.commands.arms import Arms, planned
from nanodepth.commands.cost import stretches
from nanodepth.common.errors import Refused, check_choice
from nanodepth.common.files import refuse_unwritable
from nanodepth.model import LM
from nanodepth.models import checkpoint
from nanodepth.report.logs import log_of
from nanodepth.report.plot import draw_costs, show
from nanodepth.report.tables import write_csv
from nanodepth.scoring.rows import OF_TASKS, Asked, Subject, measures_of
from nanodepth.scoring.scores import parse_tasks
from nanodepth.scoring.way import Way, Ways, read_ways
from nanodepth.text.loader import Rows
from nanodepth.train import config_file, in_steps, read, read_log

FACTS = 'run', 'seed', 'way', 'steps', 'tokens', 'flops', 'all_flops', 'layers', 'parameters'


@dataclass(kw_only=True)
class Options(Ways, Asked):
    # two or more arms, each a config or, in quotes, a command line of train.py; all are compared
    # with the first. Or one file that gives `arms`
    lines: list[str]
    arms: dict[str, str] = field(default_factory=dict)      # {name: its line}
    ways: dict[str, list[str]] = field(default_factory=dict)    # {name: the ways it is asked in}
    against: dict[str, str] = field(default_factory=dict)   # {name: another arm than the first}
    margins: dict[str, float] = field(default_factory=dict)     # {of a metric: what is too little}
    partners: bool = True       # for each arm the first one with its training FLOPs
    seeds: str = '3'            # how many, or which, such as 4-7
    more: str = ''              # settings of every run
    measures: tuple[str, ...] = ('loss', 'text', 'log_prob')
    # the measures in the tables; (): the loss, that on text alone, the last answers
    show: tuple[str, ...] = ()
    drawn: tuple[str, ...] = ()     # the arms in the picture; (): all
    # the folder of the runs. rows.csv and compare.png in it are of the last call; an earlier one
    # makes its own again from the runs, in seconds
    out: Path = Path('out/compare')


def read_options(argv):
    "The options. One word is a file that gives them, and the command line has the last say."
    named = {word.lstrip('-').partition('=')[0] for word in argv if word.startswith('-')}
    if 'seed' in named:
        raise Refused('which seeds are trained is --seeds; the seed of the questions stands in a '
                      'file of arms')
    options = read(Options, argv, ['lines'])
    if len(options.lines) == 1:
        [file] = options.lines
        values = config_file(file, typing.get_type_hints(Options))
        values.setdefault('out', Path('out') / Path(file).stem)
        options = replace(options, **{name: value for name, value in values.items()
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

class Left(Exception):
    "A run that is not there, and why: it has diverged, or another call trains it."


def tell(text):
    "A line above the bar."
    tqdm.write(text, file=sys.stderr)


def is_whole(folder, steps):
    return checkpoint.exists(folder) and checkpoint.state_of(folder)['step'] == steps


class Clock:
    "Says once how long all runs may take, by the pace of the first twenty steps that are taken."

    def __init__(self, flops):
        self.flops_left, self.first, self.has_said = flops, None, False

    def wait(self, process, folder):
        "Until a run's process ends."
        while not self.has_said and process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=1)
            lines = read_log(folder / 'log.jsonl')
            if lines:
                now, last = time.monotonic(), lines[-1]
                self.first = self.first or (now, last)
                began, first = self.first
                if last['step'] >= first['step'] + 20:
                    pace = (now - began) / (last['flops'] - first['flops'])
                    minutes = max(1, round(pace * self.flops_left / 60))
                    tell(f'all that is to be trained may take {minutes} min')
                    self.has_said = True
        process.wait()


def train(words, folder, refuse_edited, clock):
    """train.py in a process of its own. Its line, and what it says, stand in a file beside the
    folder. Ctrl-C and SIGTERM end it at its step, and then this one."""
    is_new, told = not folder.exists(), Path(f'{folder}.txt')
    folder.mkdir(parents=True, exist_ok=True)
    with open(told, 'ab', buffering=0) as said:
        said.write(f'train {shlex.join(words)}\n'.encode())
        start = said.tell()
        # by this package, and by no file of the current folder that is called like a module
        paths = [str(Path(nanodepth.__file__).parents[1]), os.environ.get('PYTHONPATH')]
        env = dict(PYTHONSAFEPATH='1', PYTHONPATH=os.pathsep.join(filter(None, paths)))
        process = subprocess.Popen([sys.executable, '-m', 'nanodepth', 'train', *words,
                                    f'--out_dir={folder}'], stdout=said, stderr=said,
                                   start_new_session=True, env=os.environ | env)
    try:
        while is_new and process.poll() is None and not (folder / 'run.json').exists():
            time.sleep(0.1)         # it has not read its config yet
        refuse_edited()
        clock.wait(process, folder)
    except BaseException as why:
        process.terminate()
        process.wait()
        if is_new and isinstance(why, Refused):     # nobody knows by which settings it has begun
            shutil.rmtree(folder)
        raise
    if process.returncode:
        text = told.read_bytes()[start:].decode(errors='replace')
        if re.search('so it was not taken|weights are not finite', text):
            raise Left('it has diverged')
        if 'another run is at work' in text:
            raise Left('another call is training it')
        last = ''.join(text.strip().splitlines()[-1:])
        raise Refused(f'train {shlex.join(words)} ended with status {process.returncode}: {last} '
                      f'({told} has all that it said)')


def make(arms, name, seed, folder, made, clock):
    "An arm's model, made in its folder unless it is there whole. `made`: the (arm, seed) so far."
    for other in arms[name].begins:
        if (other, seed) not in made:
            raise Left(f'{other}, from which it begins, is not there')

    def refuse_edited():
        if arms.folder(name, seed) != folder:
            raise Refused(f'{name}, what it begins from, or the code of training was edited after '
                          'this command had begun: start it again')
    refuse_edited()
    config, words = arms.argv(name, seed)
    if arms[name].is_cut and not checkpoint.exists(folder):
        new = folder.with_name(f'{folder.name}.{os.getpid()}')      # whole, or not at all
        shutil.rmtree(new, ignore_errors=True)
        with contextlib.redirect_stdout(io.StringIO()):
            cut.main([*words, f'--out={new}'])
        (new / 'line.txt').write_text(f'cut {shlex.join(words)}\n')
        new.rename(folder)
    elif not arms[name].is_cut and not is_whole(folder, config.steps):
        tell(f'training {name}, seed {seed}, for {config.steps:,} steps')
        train(words, folder, refuse_edited, clock)


def flops_to_train(arms, places):
    """The training FLOPs of all runs that are not there whole. What begins from another arm is
    planned when that is there: until then it counts as much as the dearest."""
    costs, unknown = [0], 0
    for (name, seed), folder in places.items():
        if arms[name].is_cut:
            continue
        if arms[name].begins:
            unknown += not checkpoint.exists(folder)
        else:
            config, _ = arms.argv(name, seed)
            if not is_whole(folder, config.steps):
                costs.append(planned(config))
    return sum(costs) + unknown * max(costs)


# ------------------------------------------------------------------------------------ what is asked

def ways_of(options, name):
    ways = [Way(), *read_ways(options)]
    for line in options.ways.get(name, ()):
        ways += read_ways(read(Ways, shlex.split(line)))
    return ways


def refuse(options, arms):
    "Refuse what can be known before the first run: what is asked, and what is shown."
    for name in (*options.ways, *options.against, *options.against.values(), *options.drawn):
        check_choice('the arm', name, arms)
    refuse_unwritable(options.out / 'rows.csv')
    measures_of(options)
    ours, theirs = parse_tasks(options.tasks)
    names = {*ours, *(f'{task} log_prob' for task in ours), 'loss', *options.measures}
    tried = {}                  # of the metric
    for name in arms.trained():
        config, _ = arms.config(name)
        val = Rows(options.data or config.data, config.batch_size, config.context)
        names |= {*val.kinds} - {'text'}        # a measure, if it is asked
        if arms[name].begins:
            continue
        model = stretches(config)[-1][1]
        for way in ways_of(options, name):
            with way.apply(model):
                pass
        if options.metric and not tried:        # a slip in it is told by a model of random weights
            random = LM(model.config).to(checkpoint.pick_device(options.device)).eval()
            random.order = model.order
            is_read = {*options.measures} - OF_TASKS
            with torch.no_grad():
                tried = options.metric(random, val if is_read else None)
    if taken := names & tried.keys():
        raise Refused(f'the metric gives {min(taken)!r}, which is measured already: choose another '
                      'name')
    others = theirs or options.metric or {*options.measures} - {'loss', 'text', 'log_prob'}
    for name in () if others else options.show:     # the names of others' scores are not known yet
        check_choice('--show', name, names)


def wide(rows):
    "A row for each run and way, with a column for each measure."
    table = {}
    for row in rows:
        line = table.setdefault((row['run'], row['way']), dict(zip(FACTS, (
            row['group'], row['seed'], row['way'], row['steps'], row['tokens'], row['flops'],
            row['training_flops'], row['unique'], row['params']))))
        name = row['measure'] + ' right' * (row['kind'] == 'share')
        line[f'metric {name}' if name in FACTS else name] = row['mean']
    return list(table.values())


def bases(options, arms):
    "{arm: what it is compared with}: the first, or what `against` says, and that one's partners."
    first = arms.trained()[0]
    of = {name: options.against.get(name, first) for name in arms.trained()}
    partners = {base: arms.partners_of(base) for base in {*of.values()}}
    return {name: [base, *partners[base]] for name, base in of.items()
            if name != base and name not in partners[base]}


def draw(options, arms, folders):
    """Loss and answers against training FLOPs, with those of what a run began from, and tokens. A
    partner is dashed, in the colour of the arm that it is like."""
    like = {name: name for name in arms.trained()}
    for name in like:
        like |= {partner: name for partner in arms.partners_of(name)}
    groups, costs = {}, ['flops', 'tokens']
    for (name, seed), folder in folders.items():
        if arms[name].is_cut or options.drawn and name not in options.drawn:
            continue
        config, _ = arms.argv(name, seed)
        if config.init_from:            # of what it began from, tokens are not known
            costs = ['flops']
        before = checkpoint.state_of(folder)['inherited_flops']
        log = [line | dict(flops=before + line['flops']) for line in log_of(folder)]
        for line in log:
            if line['step'] < in_steps(config.warmup_steps, config.steps):
                line.pop('val_loss', None)
        groups.setdefault(name, []).append(log)
    show(options.out / 'compare.png', draw_costs, groups, costs, like)


def main(argv=None):
    options = read_options(argv)
    seeds = seeds_of(options.seeds)
    device = [] if options.device == 'auto' else [f'--device={options.device}']
    arms = Arms(options.arms, options.out, [*shlex.split(options.more), *device], options.partners)
    refuse(options, arms)
    signal.signal(signal.SIGTERM, signal.default_int_handler)       # as Ctrl-C

    jobs = [(name, seed) for seed in seeds for name in arms]
    places = {job: arms.folder(*job) for job in jobs}
    tell(f'{sum(not arms[name].is_cut for name, _ in jobs)} runs of {len(arms.trained())} arms')
    clock = Clock(flops_to_train(arms, places))
    rows, made, left, first = [], {}, [], None
    for name, seed in tqdm(jobs, 'runs', unit='run'):
        folder = places[name, seed]
        try:
            make(arms, name, seed, folder, made, clock)
        except Left as why:
            left.append(f'{name}, seed {seed}, is in no mean: {why}')
            tell(left[-1])
            continue
        made[name, seed] = folder
        if not arms[name].is_cut:
            subject = Subject(folder, options, like=first)
            first = first or subject
            if subject.data() != first.data():
                left.append(f'{name}, seed {seed}, is measured on {subject.data()}, and '
                            f'{first.path} on {first.data()}: its loss is compared with none')
            rows += subject.rows(ways_of(options, name), folder / 'notes.jsonl', group=name,
                                 run=f'{name}-{seed}', steps=subject.state['step'],
                                 flops=subject.state['flops'])
    if rows:
        measures = list(dict.fromkeys(row['measure'] for row in rows))
        answers = [row['measure'] for row in rows if row['kind'] == 'share']
        for name in options.margins:
            check_choice('the margin', name, measures)
        usual = [name for name in ('loss', 'text', *answers[-1:]) if name in measures]
        write_csv(wide(rows), options.out / 'rows.csv')
        shown = []
        for name in options.show:       # 'rank' is 'rank, depth 0', 'rank, depth 1', ..., too
            its = [each for each in measures if f'{each},'.startswith(f'{name},')]
            if not its:
                check_choice('--show', name, measures)
            shown += its
        evaluate.print_differences(rows, bases(options, arms), shown or usual or measures[:1],
                                   options.margins)
        draw(options, arms, made)
    print(*left, sep='\n', end='\n' * bool(left))
