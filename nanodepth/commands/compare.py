"""Is an idea better, at equal tokens and at equal training FLOPs? An arm is a config, or a config
with settings, as one types them after `nanodepth train`. Each arm is trained and scored with each
seed, and differences are taken seed by seed.
    nanodepth compare config/baseline.py config/own_growth.py --seeds=3 --tasks=toy_assign/0-3
    nanodepth compare docs/results/compare_toy.py   # a file that defines `arms`: see docs/EXTEND.md

Each run is trained by `nanodepth train LINE --out_dir=OUT/NAME-SEED`, and all seeds of an arm are
scored by one `nanodepth evaluate`. Each of these commands runs in a separate process, so no arm can
change the numbers of another one. The same command continues where it was stopped. The files
OUT/NAME-SEED.txt and OUT/NAME.txt have what the processes print.
"""
import contextlib
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

from nanodepth.common.errors import Refused, check_choice, nearest, as_refusal, say
from nanodepth.common.files import read_run
from nanodepth.common.options import OWN_FILES, config_file, read
from nanodepth.model import require
from nanodepth.report.logs import kinds_of, log_of
from nanodepth.report.plot import draw_runs, show
from nanodepth.report.tables import Row, print_table, read_rows, write_csv
from nanodepth.scoring.rows import MEASURES, ScoreOptions, questions_in
from nanodepth.scoring.ways import Ways, ways_of
from nanodepth.training.plan import FREE, Config
from nanodepth.training.start import differences


@dataclass(kw_only=True)
class Options(Ways, ScoreOptions):
    lines: list[str]            # two or more arms: configs, or lines of train.py; or a file of arms
    # {name: its line}. In a line, the text {lidas} becomes the folder of the arm lidas above it,
    # and --flops=lidas becomes as many --steps as the training FLOPs of that arm pay for
    arms: dict[str, str] = field(default_factory=dict)
    ways: dict[str, list[str]] = field(default_factory=dict)    # {arm: more ways to run it}
    # {arm: the arms it is compared with}. Without an entry here, an arm is compared with the first
    # one, and with each arm whose --flops names it
    against: dict[str, list[str]] = field(default_factory=dict)
    seeds: int | str = 3        # how many, or which, such as 4-7
    more: str = ''              # settings of every run; a line overrides them
    measures: tuple[str, ...] = ('loss', 'text', 'log_prob')    # as in evaluate
    metric: Callable | None = None      # of a file of arms: metric(model, loader), one more measure
    show: tuple[str, ...] = ()  # the measures in the table; (): loss, text, the last right answers
    out: Path = Path('out/compare')     # the folder of the runs, of rows.csv and compare.png


def read_options(argv):
    "Return the options. A single word is a file of options, which the command line overrides."
    typed = {word.lstrip('-').partition('=')[0] for word in argv if word.startswith('-')}
    types, run_settings = ({option.name: option.type for option in fields(cls)}
                           for cls in (Options, Config))
    # --seed and --data would be options of evaluate, but are nearly always meant for the runs
    wrong = {name for name in typed
             if name in ('seed', 'data') or name in run_settings and name not in types}
    require(not wrong, f'{", ".join(sorted(wrong))}: a setting of a run belongs in an arm, in '
            'quotes after its config, or for all arms into --more (seeds are --seeds)')
    options = read(Options, argv, ['lines'])
    if len(options.lines) == 1:
        values = arms_in(options.lines[0], types)
        options = replace(options, **{key: value for key, value in values.items()
                                      if key not in typed})
    else:       # 'config/lidas.py --lr=1e-3' is the arm 'lidas --lr=1e-3'
        arms = {re.sub(r'(\S*/)?(\S+)\.py\b', r'\2', line): line for line in options.lines}
        require(len(arms) == len(options.lines), f'two arms would have one name ({", ".join(arms)} '
                'are the names): write a file of arms, in which you name them')
        options = replace(options, arms=arms)
    if options.metric and 'metric' not in options.measures:
        options.measures += ('metric',)
    for name in ('device', 'dtype'):            # for the runs, and for scoring them
        if (value := getattr(options, name)) != 'auto':
            options.more += f' --{name}={value}'
    return options


def arms_in(file, types):
    "Return the options in a file of arms."
    hint = 'to compare two configs, name two'
    with as_refusal(Refused, why=lambda error: f'{file} is not a file of arms ({error}): {hint}'):
        values = config_file(file, types)
    require(values.get('arms'), f'{file} is not a file of arms (it defines no arms): {hint}')
    return dict(out=Path('out') / Path(file).stem) | values


def seeds_of(text):
    "Return the seeds that a text names: '3' is 0, 1, 2, and '4-7' is 4, 5, 6, 7."
    match = re.fullmatch(r'(?:(\d{1,4})-)?(\d{1,4})', text)
    seeds = ()
    if match and match[1]:
        seeds = range(int(match[1]), int(match[2]) + 1)
    elif match:
        seeds = range(int(match[2]))
    require(seeds, f'--seeds={text} is neither a number of seeds, such as 3, nor a range, such as '
            '4-7')
    return seeds


# ----------------------------------------------------------------------------------------- the runs

@dataclass(eq=False)            # two Runs are equal only if they are one object
class Run:
    "A run of an arm: the arm with one seed."
    name: str               # of the arm
    seed: int
    folder: Path
    words: list             # of the train command, without the steps that --flops stands for
    parents: list           # the Runs whose folders the arm's line names
    paid_like: list         # the Run whose training FLOPs this run gets, if there is one

    def needs(self):
        return self.parents + self.paid_like

    def all_words(self):
        "Return the words of the train command. (For --flops, the other run's parents must exist.)"
        words = self.words
        for run in self.paid_like:
            flops = dry_run_of(run.all_words())['flops']
            words = [*words, f'--steps={dry_run_of(words, flops)["steps"]}']
        return words

    def has_known_cost(self):
        "Return whether the cost can be computed now, before any other model is trained."
        return not self.parents and all(run.has_known_cost() for run in self.paid_like)


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
            why = run_command(['train', *words, *options], Path(folder) / 'printed.txt')
            require(not why, why)
            DRY_RUNS[key] = json.loads(file.read_text())
    return DRY_RUNS[key]


def runs_of(options, seed):
    "Return {name: its Run} for all arms with one seed. A line may name the arms above it."
    runs = {}
    for name, line in options.arms.items():
        with as_refusal(ValueError, why=lambda error: f'{line}: {error}'):    # a quote that is open
            words = shlex.split(options.more) + shlex.split(line)
        require(not {word.partition('=')[0] for word in words} & {'--seed', '--out_dir'},
                f'{name}: an arm sets no --seed and no --out_dir; compare has --seeds and --out')
        parents = sorted({*re.findall(r'\{(.+?)\}', ' '.join(words))})
        paid_like = [word.removeprefix('--flops=') for word in words
                     if word.startswith('--flops=')][-1:]
        for other in parents + paid_like:
            require(other in runs, f'{name}: no arm {other!r} is above it{nearest(other, runs)}')
        words = [re.sub(r'\{(.+?)\}', lambda match: str(runs[match[1]].folder), word)
                 for word in words if not word.startswith('--flops=')]
        folder = options.out / re.sub(r'[^\w.=+-]+', '_', f'{name}-{seed}')
        require(folder not in [run.folder for run in runs.values()],
                f'two arms would have the folder {folder}: give one of them another name')
        runs[name] = Run(name, seed, folder, [*words, f'--seed={seed}'],
                         parents=[runs[other] for other in parents],
                         paid_like=[runs[other] for other in paid_like])
    return runs


def partners_of(options, runs):
    """For each arm whose FLOPs differ by more than 2% from those of the first arm, add a copy of
    the first arm that trains for the FLOPs of that arm. The copy is called the arm's partner.
    Return {partner: its line} and {arm: the arms it is compared with}. (The steps of a partner are
    computed for one seed, and are the same for all.)"""
    first, *others = runs.values()
    partners, compared = {}, {run.name: [first.name] for run in others}
    first_flops = dry_run_of(first.all_words())['flops']
    for run in others:
        if not run.has_known_cost():
            say(f'{run.name} begins from another arm, so it gets no partner of equal FLOPs: a file '
                'of arms may name one, with --flops')
            continue
        flops = dry_run_of(run.all_words())['flops']
        if abs(flops - first_flops) <= 0.02 * first_flops:
            continue
        steps = dry_run_of(first.all_words(), flops)['steps']
        name, line = (f'{re.sub(" --steps=[^ ]+", "", text)} --steps={steps}'
                      for text in (first.name, options.arms[first.name]))
        if name == run.name:        # this arm is the first one with other steps: no partner
            continue
        is_same = (options.arms | partners).get(name, line) == line
        require(is_same, f'two different arms would be called {name}: write a file of arms, which '
                'names them')
        if name not in options.arms | partners:
            say(f'also training {name!r}, which costs as many FLOPs as {run.name!r}')
            partners[name] = line
        compared[run.name].append(name)
    return partners, compared


def compared_with(options, runs):
    """Return {arm: the arms it is compared with}: by default the first one, and each arm that has
    this arm's FLOPs."""
    first, *others = runs
    compared = {}
    for name in others:
        compared[name] = [first, *(other for other in runs if runs[name] in runs[other].paid_like)]
    return compared | options.against


def make(run, first_run):
    """Train a run, unless it is complete and has the settings of its arm. train.py continues a run
    that was stopped, and refuses other settings. `first_run` is the arm's Run of the first seed."""
    file = run.folder / 'ckpt.pt'
    if file.exists():
        for other in run.needs():
            is_old = file.stat().st_mtime < (other.folder / 'ckpt.pt').stat().st_mtime
            require(not is_old, f'{run.folder} is older than {other.folder}, which it needs: '
                    f'remove {run.folder}, or choose another --out')
    # A dry run takes seconds, so an arm's settings are computed for its first seed alone. With
    # another seed the folders of its parents differ, and so do the steps that --flops stands for,
    # where r is drawn.
    state, settings = read_run(run.folder), dict(dry_run_of(first_run.words, costs=False)['config'])
    for name in ('init_from', 'branch_from'):
        for first, parent in zip(first_run.parents, run.parents):
            if settings[name]:
                settings[name] = settings[name].replace(str(first.folder), str(parent.folder))
    may_differ = {'seed'}
    if run.paid_like:
        may_differ |= {'steps', 'warmup_steps', 'decay_steps'}
    is_complete = 'step' in state and state['step'] == state['config']['steps']
    if not is_complete or differences(settings, state['config'], but=FREE | may_differ):
        log_file = Path(f'{run.folder}.txt')
        why = run_command(['train', *run.all_words(), f'--out_dir={run.folder}'], log_file)
        require(not why, f'{why} (see {log_file})')


def run_command(words, log_file):
    """Run a command of nanodepth in a separate process, and append what it prints to a file. Return
    '', or why the command failed. Ctrl-C reaches that process directly, and SIGTERM and SIGHUP are
    passed on. In each case this function waits until train.py has saved its checkpoint, and then
    ends compare."""
    words = [*OWN_FILES, *words]
    tqdm.write(shlex.join(words), file=sys.stderr)
    log_file.parent.mkdir(parents=True, exist_ok=True)
    # without these the process would import from the current folder, which may have a tqdm.py
    env = dict(PYTHONSAFEPATH='1', PYTHONPATH=os.pathsep.join(filter(None, sys.path)))
    with open(log_file, 'ab', buffering=0) as file:
        begin = file.tell()
        file.write(f'{shlex.join(words)}\n'.encode())
        process = subprocess.Popen([sys.executable, '-m', 'nanodepth', *words], stdout=file,
                                   stderr=file, env=os.environ | env)
        with passing_on_signals(process) as signals:
            process.wait()
    if signals:
        sys.exit(128 + signals[0])
    lines = log_file.read_bytes()[begin:].decode(errors='replace').splitlines()
    refused = [line for line in lines if re.match(r'(train|evaluate): ', line)]
    if not process.returncode:
        return ''
    return refused[-1] if refused else f'status {process.returncode} after: {lines[-1]}'


@contextlib.contextmanager
def passing_on_signals(process):
    "Inside this `with`, signals do not end compare. They are passed on, and put into the list."
    signals = []

    def pass_on(number, _):
        signals.append(number)
        if number != signal.SIGINT:         # the terminal has sent that to the process as well
            process.send_signal(number)
    numbers = [getattr(signal, name) for name in ('SIGINT', 'SIGTERM', 'SIGHUP')
               if hasattr(signal, name)]    # (Windows has no SIGHUP)
    handlers = [signal.signal(number, pass_on) for number in numbers]
    try:
        yield signals
    finally:
        for number, handler in zip(numbers, handlers):
            signal.signal(number, handler)


# ---------------------------------------------------------------------------- how they are scored

def also_of(options, name):
    "Return the ways of an arm as the option --also of evaluate."
    return '; '.join(filter(None, (options.also, *options.ways.get(name, ()))))


def score(options, runs):
    """Return the Rows of all seeds of an arm, which `nanodepth evaluate` computes in a separate
    process. That process runs the arm's configs first, so it knows their Spans, and then the file
    of arms, so it knows the metric."""
    name, folder = runs[0].name, runs[0].folder
    out = folder.with_name(folder.name.removesuffix(f'-{runs[0].seed}') + '.csv')
    words = [word for word in runs[0].words if word.endswith('.py') and word[0] != '-']
    if len(options.lines) == 1:
        words += options.lines
    words += ['evaluate', *(str(run.folder) for run in runs), f'--out={out}']
    for option in (*fields(ScoreOptions), *fields(Ways)):
        value = getattr(options, option.name)
        if option.name != 'also' and value is not None and value != option.default:
            text = ','.join(map(str, value)) if isinstance(value, tuple) else value
            words.append(f'--{option.name}={text}')
    if also := also_of(options, name):
        words.append(f'--also={also}')
    why = run_command(words, out.with_suffix('.txt'))
    require(not why, f'{why} (see {out.with_suffix(".txt")})')
    seed_of = {run.folder.name: run.seed for run in runs}
    return [Row(**row | dict(group=name, seed=seed_of[row['run']])) for row in read_rows(out)]


def report(options, compared, rows, scored):
    """Print the table, and draw how the runs' validation scores changed while they trained.
    `scored` is {arm: its Runs}."""
    measures = list(dict.fromkeys(row.measure for row in rows))
    for name in options.show:
        check_choice('the measure', name, measures)
    shares = [row.measure for row in rows if row.kind == 'share']
    usual = ['loss', 'text', *shares[-1:]]          # of several tasks, the last is the hardest
    shown = [name for name in options.show or usual if name in measures]
    print_table(rows, compared, shown or measures[:1])
    logs = {name: [log_of(run.folder) for run in runs] for name, runs in scored.items()}
    kinds = ['loss', *[kind for kind in kinds_of(logs) if kind != 'text'][-1:]]
    costs = ['flops']
    if not any(math.isnan(row.tokens) for row in rows):     # nan: a run began from another one
        costs.append('tokens')
    show(options.out / 'compare.png', draw_runs, logs, kinds, costs)
    books = {read_run(run.folder).get('book') for runs in scored.values() for run in runs}
    if len(books) > 1:
        print('These runs were trained by several versions of model.py, training/ and so on. To '
              'compare like with like, choose another --out.')


# ------------------------------------------------------------------------------------- all of it

def refuse_early(options, compared, runs):
    "Refuse whatever can be known to fail before the first run. `runs` are those of one seed."
    if options.metric:
        MEASURES['metric'] = options.metric         # so that it is a known name
    questions_in(options)
    for name in (*options.ways, *compared, *sum(map(list, compared.values()), [])):
        check_choice('the arm', name, [*runs])
    for name, run in runs.items():
        ways_of(replace(options, also=also_of(options, name)))
        if run.has_known_cost():
            dry_run_of(run.all_words())
        else:
            dry_run_of(run.words, costs=False)


def train_all(runs_by_seed):
    "Train all runs. Return {arm: its complete Runs} and {a Run that failed: why}."
    complete, failed = {}, {}
    runs = [run for runs in runs_by_seed for run in runs.values()]
    for run in tqdm(runs, 'runs', unit='run'):
        try:
            for other in run.needs():
                require(other not in failed, f'{other.name}, which it needs, is missing')
            make(run, runs_by_seed[0][run.name])
            complete.setdefault(run.name, []).append(run)
        except Refused as why:
            failed[run] = f'{run.name}, seed {run.seed}, is left out of the means: {why}'
            say(failed[run])
    return complete, failed


def main(argv=None):
    options = read_options(sys.argv[1:] if argv is None else argv)
    DRY_RUNS.clear()                # the configs may have been edited since
    seeds = seeds_of(str(options.seeds))
    runs = runs_of(options, seeds[0])
    if len(options.lines) > 1:
        partners, compared = partners_of(options, runs)
        options = replace(options, arms=options.arms | partners)
    else:
        compared = compared_with(options, runs)
    runs_by_seed = [runs_of(options, seed) for seed in seeds]
    refuse_early(options, compared, runs_by_seed[0])
    complete, failed = train_all(runs_by_seed)
    if complete:        # all arms are scored on the rows of the first one
        first = read_run(next(iter(complete.values()))[0].folder)['config']
        options.rows = options.rows or first['batch_size']
        if options.batches is None:
            options.batches = first['eval_batches']
    rows, scored = [], {}
    for name, runs in tqdm(complete.items(), 'arms', unit='arm'):
        try:
            rows += score(options, runs)
            scored[name] = runs
            write_csv(rows, options.out / 'rows.csv')
        except Refused as why:
            for run in runs:
                failed[run] = f'{name}, seed {run.seed}, is left out of the means: {why}'
            say(failed[runs[0]])
    if rows:
        report(options, compared, rows, scored)
    if failed:
        print(*failed.values(), sep='\n')
        sys.exit(1)
