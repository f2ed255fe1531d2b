"""Is an idea better, at equal tokens and at equal training FLOPs? Each arm, a config or a line of
train.py, is trained and scored with each seed. Differences are taken seed by seed.
    nanodepth compare config/baseline.py config/own_growth.py --seeds=3 --tasks=toy_assign/0-3
    nanodepth compare docs/results/compare_toy.py   # a file that defines `arms`: see docs/EXTEND.md

Each run is trained by `nanodepth train LINE --out_dir=OUT/NAME-SEED`, and all seeds of an arm are
scored by one `nanodepth evaluate`. Each of these commands runs in a separate process, so no arm can
change the numbers of another one. The same command continues where it was stopped. The files
OUT/NAME-SEED.txt and OUT/NAME.txt have what the processes print.
"""
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path

from tqdm import tqdm

from nanodepth.common.errors import Refused, check_choice, nearest, refusing, say
from nanodepth.common.files import read_run
from nanodepth.common.options import config_file, read
from nanodepth.model import require
from nanodepth.report.logs import kinds_of, log_of
from nanodepth.report.plot import draw_runs, show
from nanodepth.report.tables import Row, print_table, read_rows, write_csv
from nanodepth.scoring.rows import ScoreOptions, questions_in
from nanodepth.scoring.way import Ways, ways_of
from nanodepth.training.plan import FREE, Config
from nanodepth.training.start import differences


@dataclass(kw_only=True)
class Options(Ways, ScoreOptions):
    lines: list[str]            # two or more arms: configs, or lines of train.py; or a file of arms
    # {name: its line}. In a line, {name} is the folder of an arm above it, and --flops=name stands
    # for as many --steps as that arm's training FLOPs pay for
    arms: dict[str, str] = field(default_factory=dict)
    ways: dict[str, list[str]] = field(default_factory=dict)    # {arm: more ways to run it}
    # {arm: the arms it is compared with}; otherwise the first, and each with --flops=arm
    against: dict[str, list[str]] = field(default_factory=dict)
    seeds: int | str = 3        # how many, or which, such as 4-7
    more: str = ''              # settings of every run; a line overrides them
    measures: tuple[str, ...] = ('loss', 'text', 'log_prob')    # as in evaluate
    metric: Callable | None = None      # of a file of arms: metric(model, loader), one more measure
    show: tuple[str, ...] = ()  # the measures in the tables; (): loss, text and the last answers
    out: Path = Path('out/compare')     # the folder of the runs, of rows.csv and compare.png


def read_options(argv):
    "Return the options. A single word is a file of options, which the command line overrides."
    typed = {word.lstrip('-').partition('=')[0] for word in argv if word.startswith('-')}
    types, run_settings = ({option.name: option.type for option in fields(cls)}
                           for cls in (Options, Config))
    wrong = typed & (run_settings.keys() - types.keys() | {'seed', 'data'})
    require(not wrong, f'{", ".join(sorted(wrong))}: a setting of a run belongs into an arm, in '
            'quotes after its config, or for all arms into --more (seeds are --seeds)')
    options = read(Options, argv, ['lines'])
    file, *others = options.lines
    if others:
        arms = {re.sub(r'(\S*/)?(\S+)\.py\b', r'\2', line): line for line in options.lines}
        require(len(arms) == len(options.lines), 'two arms have one name: give two that differ')
        return replace(options, arms=arms)
    try:
        values = config_file(file, types)
        require(values.get('arms'), 'it defines no arms')
    except Refused as error:
        raise Refused(f'{file} is not a file of arms ({error}): to compare two configs, name two')
    values = dict(out=Path('out') / Path(file).stem) | values
    return replace(options, **{key: value for key, value in values.items() if key not in typed})


def seeds_of(text):
    "Return the seeds that a text names: '3' is 0, 1, 2, and '4-7' is 4, 5, 6, 7."
    match = re.fullmatch(r'(?:(\d{1,4})-)?(\d{1,4})', text)
    seeds = match and range(int(match[1] or 0), int(match[2]) + bool(match[1]))
    require(seeds, f'--seeds={text} is neither a number of seeds, such as 3, nor a range, such as '
            '4-7')
    return seeds


# ----------------------------------------------------------------------------------------- the runs

@dataclass(eq=False)
class Run:
    "An arm with a seed."
    name: str               # of the arm
    seed: int
    folder: Path
    words: list             # of the train command, without the steps that --flops stands for
    parents: list           # the Runs whose folders the arm's line names
    equals: list            # the Run whose training FLOPs this run gets, or nothing

    def all_words(self):
        "Return the words of the train command. (For --flops, the other run's parents must exist.)"
        steps = [f'--steps={dry_run_of(self.words, dry_run_of(run.all_words())["flops"])["steps"]}'
                 for run in self.equals]
        return [*self.words, *steps]

    def waits(self):
        "Return whether another model must be trained before we know what this run costs."
        return bool(self.parents) or any(run.waits() for run in self.equals)


DRY_RUNS = {}      # {the arguments of dry_run_of: what it returned}


def dry_run_of(words, pays=None, costs=True):
    """Return what `nanodepth train --dry_run` computes for a line, in a separate process: steps,
    settings and, with `costs`, the training FLOPs. These include the FLOPs of the model that the
    run begins from, which must exist. With `pays`, the run takes as many steps as these FLOPs
    pay for."""
    key = (*words, pays, costs)
    if key not in DRY_RUNS:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / 'plan.json'
            options = ['--dry_run', f'--json={file}', f'--costs={costs}']
            if pays:
                options.append(f'--pays={pays}')
            try:
                run_command(['train', *words, *options], Path(folder) / 'printed.txt')
            except Refused as error:        # the file that the message names will be gone
                raise Refused(str(error).partition(' (status ')[0]) from None
            DRY_RUNS[key] = json.loads(file.read_text())
    return DRY_RUNS[key]


def runs_of(options, seed):
    "Return {name: its Run} for all arms with a seed. A line may name the arms above it."
    runs = {}
    for name, line in options.arms.items():
        with refusing(ValueError, why=lambda error: f'{line}: {error}'):
            words = shlex.split(options.more) + shlex.split(line)
        require(not {word.partition('=')[0] for word in words} & {'--seed', '--out_dir'},
                f'{name}: an arm sets no --seed and no --out_dir; compare has --seeds and --out')
        parents = sorted({*re.findall(r'\{(.+?)\}', ' '.join(words))})
        flops = [word[8:] for word in words if word.startswith('--flops=')][-1:]
        for other in (*parents, *flops):
            require(other in runs, f'{name}: no arm {other!r} is above it{nearest(other, runs)}')
        words = [re.sub(r'\{(.+?)\}', lambda match: str(runs[match[1]].folder), word)
                 for word in words if not word.startswith('--flops=')]
        folder = options.out / re.sub(r'[^\w.=+-]+', '_', f'{name}-{seed}')
        require(folder not in [run.folder for run in runs.values()],
                f'two arms would have the folder {folder}: give one of them another name')
        runs[name] = Run(name, seed, folder, [*words, f'--seed={seed}'],
                         *([runs[other] for other in each] for each in (parents, flops)))
    return runs


def add_partners(options, runs):
    """Make the first arm again with the FLOPs of each other arm, if these differ by more than 2%.
    Return {arm: the arms it is compared with}."""
    first, *others = runs.values()
    compared = {run.name: [first.name] for run in others}
    own = dry_run_of(first.all_words())['flops']
    for run in others:
        flops = dry_run_of(run.all_words())['flops']
        if abs(flops - own) > 0.02 * own:
            steps = f' --steps={dry_run_of(first.all_words(), flops)["steps"]}'
            partner, line = (re.sub(r' --steps=\S+', '', text) + steps
                             for text in (first.name, options.arms[first.name]))
            require(options.arms.setdefault(partner, line) == line,
                    f'{partner} is {options.arms[partner]}: give it another name')
            if partner != run.name:
                say(f'{partner} is trained, too, for the FLOPs of {run.name}')
                compared[run.name].append(partner)
    return compared


def make(run, first_run):
    """Train a run with train.py, which continues a stopped run and refuses other settings, unless
    the run is complete and has the settings of its arm. `first_run` is the arm's Run of the first
    seed."""
    file = run.folder / 'ckpt.pt'
    for parent in run.parents if file.exists() else ():
        is_old = file.stat().st_mtime < (parent.folder / 'ckpt.pt').stat().st_mtime
        require(not is_old, f'{run.folder} began from an earlier model than {parent.folder} is '
                'now: remove this folder, or choose another --out')
    # The settings of an arm are asked for its first seed. The others differ in the folders of their
    # parents, and with --flops in their steps, because r is drawn.
    state, settings = read_run(run.folder), dict(dry_run_of(first_run.words, costs=False)['config'])
    for name in ('init_from', 'branch_from'):
        for first, parent in zip(first_run.parents, run.parents):
            if settings[name]:
                settings[name] = settings[name].replace(str(first.folder), str(parent.folder))
    may_differ = {'seed'}
    if run.equals:
        may_differ |= {'steps', 'warmup_steps', 'decay_steps'}
    is_complete = state.get('step') == (state.get('config') or {}).get('steps', math.nan)
    if not is_complete or differences(settings, state['config'], but=FREE | may_differ):
        run_command(['train', *run.all_words(), f'--out_dir={run.folder}'],
                    Path(f'{run.folder}.txt'))


def run_command(words, log_file):
    """Run a command of nanodepth in a separate process, and append what it prints to a file. Ctrl-C
    reaches that process directly, and SIGTERM and SIGHUP are passed on. In each case this function
    waits until train.py has saved its checkpoint."""
    tqdm.write(shlex.join(words), file=sys.stderr)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # the process imports what this one imports, and not a tqdm.py in the current folder
    env = dict(PYTHONSAFEPATH='1', PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    with open(log_file, 'ab', buffering=0) as file:
        begin = file.tell()
        file.write(f'{shlex.join(words)}\n'.encode())
        process = subprocess.Popen([sys.executable, '-m', 'nanodepth', *words], stdout=file,
                                   stderr=file, env=os.environ | env)
        signals = []

        def pass_on(number, _):
            signals.append(number)
            process.send_signal(number)
        numbers = [getattr(signal, name) for name in ('SIGTERM', 'SIGHUP') if hasattr(signal, name)]
        handlers = [signal.signal(number, pass_on) for number in numbers]
        handlers.append(signal.signal(signal.SIGINT, lambda number, _: signals.append(number)))
        try:
            process.wait()
        finally:
            for number, handler in zip([*numbers, signal.SIGINT], handlers):
                signal.signal(number, handler)
    if signals:
        sys.exit(128 + signals[0])
    lines = log_file.read_bytes()[begin:].decode(errors='replace').splitlines()
    command = next(word for word in words if not word.endswith('.py'))
    why = [line for line in lines if line.startswith(f'{command}: ')] or lines
    require(process.returncode == 0, f'{why[-1]} (status {process.returncode}; {log_file})')


# ---------------------------------------------------------------------------- how they are scored

def score(options, runs, arms_file):
    """Return the Rows of all seeds of an arm, which `nanodepth evaluate` computes in a separate
    process. That process runs the arm's configs first, so it knows their Spans, and `arms_file`, a
    list that is empty or has the file of arms, so it knows the metric."""
    name, folder = runs[0].name, runs[0].folder
    out = folder.with_name(folder.name.rpartition('-')[0] + '.csv')
    words = [word for word in runs[0].words if word.endswith('.py') and word[0] != '-']
    words += [*arms_file, 'evaluate', *(str(run.folder) for run in runs), f'--out={out}']
    for option in (*fields(ScoreOptions), *fields(Ways)):
        value = getattr(options, option.name)
        if option.name != 'also' and value is not None and value != option.default:
            text = ','.join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f'--{option.name}={text}')
    if also := '; '.join(filter(None, (options.also, *options.ways.get(name, ())))):
        words.append(f'--also={also}')
    run_command(words, out.with_suffix('.txt'))
    seed_of = {run.folder.name: run.seed for run in runs}
    return [Row(**row | dict(group=name, seed=seed_of[row['run']])) for row in read_rows(out)]


def compared_with(options, runs):
    "Return {arm: the arms it is compared with}: from `against`, or the first and its equals."
    first, *others = runs
    compared = {}
    for name in others:
        equals = [other for other in runs if runs[name] in runs[other].equals]
        compared[name] = [first, *equals]
    compared |= options.against
    for name in (*options.ways, *compared, *sum(map(list, compared.values()), [])):
        check_choice('the arm', name, [*runs])
    return compared


def report(options, compared, rows, scored):
    "Print the table, and draw how the runs' validation scores changed while they trained."
    measures = list(dict.fromkeys(row.measure for row in rows))
    for name in options.show:
        check_choice('the measure', name, measures)
    shares = [row.measure for row in rows if row.kind == 'share']
    usual = ['loss', 'text', *shares[-1:]]
    shown = [name for name in options.show or usual if name in measures]
    print_table(rows, compared, shown or measures[:1])
    logs = {name: [log_of(run.folder) for run in scored if run.name == name]
            for name in dict.fromkeys(run.name for run in scored)}
    kinds = ['loss', *[kind for kind in kinds_of(logs) if kind != 'text'][-1:]]
    costs = ['flops']
    if not any(math.isnan(row.tokens) for row in rows):
        costs.append('tokens')
    show(options.out / 'compare.png', draw_runs, logs, kinds, costs)
    books = {read_run(run.folder).get('book') for run in scored}
    if len(books) > 1:
        print('These runs were trained by several versions of model.py, training/ and so on. To '
              'compare like with like, choose another --out.')


def main(argv=None):
    options = read_options(sys.argv[1:] if argv is None else argv)
    DRY_RUNS.clear()
    seeds = seeds_of(str(options.seeds))
    options.more += ''.join(f' --{name}={value}' for name in ('device', 'dtype')
                            if (value := getattr(options, name)) != 'auto')
    arms_file = options.lines if len(options.lines) == 1 else []
    if options.metric and 'metric' not in options.measures:
        options.measures += ('metric',)
    runs = runs_of(options, seeds[0])
    # A mistake that can be seen before the first run is refused here.
    questions_in(replace(options, measures=tuple({*options.measures} - {'metric'})))
    compared = (add_partners if len(options.lines) > 1 else compared_with)(options, runs)
    by_seed = [runs_of(options, seed) for seed in seeds]
    for name, run in by_seed[0].items():
        ways_of(replace(options, also='; '.join(options.ways.get(name, ()))))
        if run.waits():
            dry_run_of(run.words, costs=False)
        else:
            dry_run_of(run.all_words())
    failed, complete = {}, {}
    for run in tqdm([run for runs in by_seed for run in runs.values()], 'runs', unit='run'):
        try:
            for other in run.parents + run.equals:
                require(other not in failed, f'{other.name}, which it needs, is missing')
            make(run, by_seed[0][run.name])
            complete.setdefault(run.name, []).append(run)
        except Refused as why:
            failed[run] = f'{run.name}, seed {run.seed}, is in no mean: {why}'
            say(failed[run])
    rows, scored = [], []
    for name, runs in tqdm(complete.items(), 'arms', unit='arm'):
        try:
            # all arms are scored on the rows of the first one
            first = read_run(next(iter(complete.values()))[0].folder)['config']
            options.rows = options.rows or first['batch_size']
            if options.batches is None:
                options.batches = first['eval_batches']
            rows += score(options, runs, arms_file)
            scored += runs
            write_csv(rows, options.out / 'rows.csv')
        except Refused as why:
            for run in runs:
                failed[run] = f'{name}, seed {run.seed}, is in no mean: {why}'
            say(failed[runs[0]])
    if rows:
        report(options, compared, rows, scored)
    if failed:
        print(*failed.values(), sep='\n')
        sys.exit(1)
