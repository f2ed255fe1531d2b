"""Is an idea better, at equal tokens and at equal training FLOPs? Each arm, a config or a line of
train.py, is trained with each seed, in OUT/NAME-SEED. Differences are taken seed by seed.
    nanodepth compare config/baseline.py config/own_growth.py --seeds=3 --tasks=toy_assign/0-3
    nanodepth compare docs/results/compare_toy.py   # a file that gives `arms`: see docs/EXTEND.md

The same command goes on where it was stopped. OUT/NAME-SEED.txt says what a run is made of, and
then what it said. If it would now be made of something else, a line says so before any run.
"""
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tqdm import tqdm

import nanodepth
from nanodepth.commands.train import costs, steps_for
from nanodepth.common.errors import Refused, check_choice, nearest, refusing, say
from nanodepth.common.files import checkpoint_file, hash_of, read_run, replace as write
from nanodepth.common.options import config_file, read
from nanodepth.model import require
from nanodepth.report.logs import kinds_of, log_of
from nanodepth.report.plot import draw_runs, show
from nanodepth.report.tables import add_to_csv, print_differences
from nanodepth.scoring.rows import Asked, Subject, ask, questions_in
from nanodepth.scoring.way import Ways, in_words, ways_of
from nanodepth.training.loader import open_data
from nanodepth.training.plan import FREE, Config


@dataclass(kw_only=True)
class Options(Ways, Asked):
    lines: list[str]            # two or more arms: configs, or lines of train.py; or a file of arms
    # {name: its line}. In a line {name} is the folder of an arm above it, and --flops=name as many
    # --steps as that arm's training FLOPs pay for
    arms: dict[str, str] = field(default_factory=dict)
    ways: dict[str, list[str]] = field(default_factory=dict)    # {arm: the ways it is asked in}
    # {arm: other arms}; else the first, and each that has its FLOPs by --flops
    against: dict[str, list[str]] = field(default_factory=dict)
    seeds: int | str = 3        # how many, or which, such as 4-7
    more: str = ''              # settings of every run; a line's own have the last say
    measures: tuple[str, ...] = ('loss', 'text', 'log_prob')    # as evaluate's
    show: tuple[str, ...] = ()  # of these in the tables; (): the loss, that on text, last answers
    out: Path = Path('out/compare')     # the picture is of the last call, rows.csv of all


def read_options(argv):
    "The options. One word is a file that gives them, and the command line has the last say."
    named = {word.lstrip('-').partition('=')[0] for word in argv if word.startswith('-')}
    own, of_runs = ({each.name: each.type for each in fields(cls)} for cls in (Options, Config))
    wrong = named & (of_runs.keys() - own.keys() | {'seed', 'data'})
    require(not wrong, f'{wrong} are settings of a run: write them into an arm, in quotes behind '
            'its config, or for all into --more (which seeds are trained is --seeds)')
    options = read(Options, argv, ['lines'])
    file, *others = options.lines
    if others:
        arms = {re.sub(r'(\S*/)?(\S+)\.py\b', r'\2', line): line for line in options.lines}
        require(len(arms) == len(options.lines), 'two arms have one name: give two that differ')
        return replace(options, arms=arms)
    try:
        values = config_file(file, own)
        require(values.get('arms'), 'it gives none')
    except Refused as error:
        raise Refused(f'{file} is no file of arms ({error}): to compare two configs, name two')
    values = dict(out=Path('out') / Path(file).stem) | values
    return replace(options, **{key: value for key, value in values.items() if key not in named})


def seeds_of(text):
    "'3' is 0, 1, 2, and '4-7' is 4, 5, 6, 7."
    match = re.fullmatch(r'(?:(\d{1,4})-)?(\d{1,4})', text)
    seeds = match and range(int(match[1] or 0), int(match[2]) + bool(match[1]))
    require(seeds, f'--seeds={text} must be how many, such as 3, or which, such as 4-7')
    return seeds


# ----------------------------------------------------------------------------------------- the runs

@dataclass(eq=False)
class Run:
    "An arm with a seed."
    name: str               # of the arm
    seed: int
    folder: Path
    words: list             # of its command, but for the steps that --flops stands for
    parents: list           # the Runs whose folders its line names
    flops: list             # the Run whose training FLOPs it has, if its line names one
    facts: list = None      # what it is made of
    config: Config = None   # (its Spans are of classes that are known as long as it is there)

    def all_words(self):
        "(of --flops, when that is there from which the other run begins)"
        steps = [f'--steps={steps_for(costs(run.all_words())[1], self.words)}'
                 for run in self.flops]
        return [*self.words, *steps]

    def waits(self):
        "Must a model be made before it is known what it costs?"
        return bool(self.parents) or any(run.waits() for run in self.flops)


def runs_of(options, seed):
    "{name: its Run} of all arms with a seed. A line may name the arms above it."
    runs = {}
    for name, line in options.arms.items():
        with refusing(ValueError, why=lambda error: f'{line}: {error}'):
            words = shlex.split(options.more) + shlex.split(line)
        require(not {word.partition('=')[0] for word in words} & {'--seed', '--out_dir'},
                f'{name}: which seeds are trained is --seeds, and where is --out')
        parents = sorted({*re.findall(r'\{(.+?)\}', ' '.join(words))})
        flops = [word[8:] for word in words if word.startswith('--flops=')][-1:]
        for other in (*parents, *flops):
            require(other in runs, f'{name}: no arm {other!r} is above it{nearest(other, runs)}')
        words = [re.sub(r'\{(.+?)\}', lambda match: str(runs[match[1]].folder), word)
                 for word in words if not word.startswith('--flops=')]
        folder = options.out / re.sub(r'[^\w.=+-]+', '_', f'{name}-{seed}')
        require(folder not in [run.folder for run in runs.values()], f'two arms have {folder}')
        runs[name] = Run(name, seed, folder, [*words, f'--seed={seed}'],
                         *([runs[other] for other in each] for each in (parents, flops)))
    return runs


def add_partners(options, runs):
    "The first one for the FLOPs of each other one is an arm, too. {arm: what it's compared with}"
    first, *others = runs.values()
    of = {run.name: [first.name] for run in others}
    own = costs(first.all_words())[1]
    for run in others:
        flops = costs(run.all_words())[1]
        if abs(flops - own) > 0.02 * own:
            steps = f' --steps={steps_for(flops, first.all_words())}'
            partner, line = (re.sub(r' --steps=\S+', '', text) + steps
                             for text in (first.name, options.arms[first.name]))
            require(options.arms.setdefault(partner, line) == line,
                    f'{partner} is {options.arms[partner]}: give it another name')
            if partner != run.name:
                say(f'{partner} is trained, too, for the FLOPs of {run.name}')
                of[run.name].append(partner)
    return of


def facts_of(run):
    """What a run is made of, in lines: its words, its data, the runs that it needs, and the files
    of the book, of its config and what that imports, and of a model from elsewhere."""
    files = {*map(nanodepth.file_of, nanodepth.BOOK)}
    run.config = config = read(Config, run.words, files=files)
    words = [word for word in run.words if word.partition('=')[0].lstrip('-') not in FREE]
    facts = [f'words {shlex.join(words)}']
    parts = {other.name: other.facts for other in run.parents + run.flops}
    parts |= {name: data.description() for name, data in open_data(config).items()}
    facts += [f'{name} {hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]}'
              for name, value in parts.items()]
    for parent in filter(None, () if run.parents else (config.init_from, config.branch_from)):
        files |= {checkpoint_file(parent), *Path(parent).glob('*.safetensors')}
    facts += [f'{file.name} {hash_of(file)[:12]}' for file in files if file.is_file()]
    return sorted(facts)


def refuse_another(run):
    "What was made of something else stays as it is."
    said = Path(f'{run.folder}.txt')
    was = said.read_text(errors='replace') if said.exists() else 'everything'
    differ = {*was.partition('\n\n')[0].splitlines()} ^ {*run.facts}
    names = ', '.join(sorted({fact.split()[0] for fact in differ}))
    require(not differ or not run.folder.exists(), f'{run.folder} was made of something else '
            f'({names}: see {said}): choose another --out, or remove this folder')


def make(run):
    "Its model, unless that is there whole: train.py in a process of its own."
    require(facts_of(run) == run.facts, f'{run.name} was edited after this command had begun')
    words, said = run.all_words(), Path(f'{run.folder}.txt')
    if read_run(run.folder).get('step') == read(Config, words).steps:
        return
    if not run.folder.exists():
        write(said, '\n'.join([*run.facts, '\n']).encode())
    call(['train', *words, f'--out_dir={run.folder}'], said)


def call(words, said):
    "A command in a process of its own, so that no run leaves anything to the next one."
    tqdm.write(shlex.join(words), file=sys.stderr)
    # it imports what this one does, and no file of the current folder that is called like a module
    env = dict(PYTHONSAFEPATH='1', PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)      # it ends as Ctrl-C does
    with open(said, 'ab', buffering=0) as file:
        file.write(f'{shlex.join(words)}\n'.encode())
        process = subprocess.Popen([sys.executable, '-m', 'nanodepth', *words], stdout=file,
                                   stderr=file, start_new_session=True, env=os.environ | env)
        try:
            process.wait()
        finally:
            process.terminate()         # train.py saves first
            process.wait()
            signal.signal(signal.SIGTERM, before)
    lines = said.read_text(errors='replace').splitlines()
    why = [line for line in lines if line.startswith('train: ')] or lines
    require(process.returncode == 0, f'{why[-1]} (status {process.returncode}; {said})')


# ------------------------------------------------------------------------------ what they are asked

def all_ways(options, name):
    own = [read(Ways, shlex.split(line)) for line in options.ways.get(name, ())]
    return [*{in_words(way): way for each in (options, *own) for way in ways_of(each)}.values()]


def compared_with(options, runs):
    "{arm: those it is compared with}: what `against` says, else the first and what has its FLOPs."
    names = [*runs]
    of = {name: [names[0], *(each for each in names if runs[name] in runs[each].flops)]
          for name in names[1:]} | options.against
    for name in (*options.ways, *of, *(each for others in of.values() for each in others)):
        check_choice('the arm', name, names)
    return of


def report(options, of, rows, asked):
    "The tables, and a picture of what the runs were validated on while they trained."
    measures = list(dict.fromkeys(row['measure'] for row in rows))
    for name in options.show:
        check_choice('the measure', name, measures)
    usual = ['loss', 'text', *[row['measure'] for row in rows if row['kind'] == 'share'][-1:]]
    shown = [name for name in options.show or usual if name in measures]
    print_differences(rows, of, shown or measures[:1])
    logs = {name: [log_of(run.folder) for run in asked if run.name == name]
            for name in dict.fromkeys(run.name for run in asked)}
    kinds = ['loss', *[kind for kind in kinds_of(logs) if kind != 'text'][-1:]]
    costs = ['flops', *['tokens'] * all(row['tokens'] >= 0 for row in rows)]     # (no nan)
    show(options.out / 'compare.png', draw_runs, logs, kinds, costs)


def main(argv=None):
    options = read_options(sys.argv[1:] if argv is None else argv)
    seeds = seeds_of(str(options.seeds))
    options.more += ''.join(f' --{name}={value}' for name in ('device', 'dtype')
                            if (value := getattr(options, name)) != 'auto')
    runs = runs_of(options, seeds[0])
    questions_in(options)       # what can be known before the first run is refused here
    of = (add_partners if len(options.lines) > 1 else compared_with)(options, runs)
    runs = [run for seed in seeds for run in runs_of(options, seed).values()]
    for run in runs:
        run.facts = facts_of(run)
        refuse_another(run)
        all_ways(options, run.name)
        if not run.waits():
            costs(run.all_words())
    rows, asked, failed, first = [], [], {}, None
    for run in tqdm(runs, 'runs', unit='run'):
        try:
            for other in run.parents + run.flops:
                require(other not in failed, f'{other.name}, which it needs, is not there')
            make(run)
            subject = Subject(run.folder, options, like=first)
            first = first or subject
            of_run = sum(ask(subject, all_ways(options, run.name), run=run.folder.name,
                             group=run.name, seed=run.seed, steps=subject.state['step']), [])
            add_to_csv(options.out / 'rows.csv', of_run)
            rows += of_run
            asked.append(run)
        except Refused as why:
            failed[run] = f'{run.name}, seed {run.seed}, is in no mean: {why}'
            say(failed[run])
    if rows:
        report(options, of, rows, asked)
    if failed:
        print(*failed.values(), sep='\n')
        sys.exit(1)
