"""Train each arm (a config or a line of train.py) with each seed, and say which differences so many
seeds resolve, at equal tokens and at equal training FLOPs. The same command goes on where it was
stopped, and an edited config is another run in another folder.
    nanodepth compare config/baseline.py config/own_growth.py --seeds=3 --tasks=toy_assign/0-3
    nanodepth compare docs/results/compare_toy.py   # a file that gives `arms`: see docs/EXTEND.md

An arm is a named line: a config or another arm's name, with settings. In a line, {name} is the
folder of another arm's model, {seed} the seed, and --flops=name stands for as many steps as that
arm's FLOPs pay for. A line may also begin with `cut`, as the command does.
"""
import contextlib
import functools
import graphlib
import hashlib
import io
import json
import math
import os
import re
import shlex
import signal
import subprocess
import sys
import typing
from dataclasses import dataclass, field, replace
from pathlib import Path

from tqdm import tqdm

import nanodepth
from nanodepth.commands import cut
from nanodepth.commands.train import planned
from nanodepth.common.errors import Refused, check_choice, nearest, refusing, say
from nanodepth.common.files import checkpoint_file, hash_of, read_run
from nanodepth.common.options import config_file, read
from nanodepth.model import require
from nanodepth.models import authors, checkpoint
from nanodepth.report.contrasts import is_same
from nanodepth.report.logs import kinds_of, log_of
from nanodepth.report.plot import draw_runs, show
from nanodepth.report.printed import print_differences
from nanodepth.report.tables import of_one_kind, write_csv
from nanodepth.scoring.rows import READ, Asked, Subject, files_of, measures_of, stamps
from nanodepth.scoring.way import Way, Ways, read_ways
from nanodepth.training.checkpoint import as_written
from nanodepth.training.loader import folders_of, open_data, parts_of
from nanodepth.training.plan import FREE, Config
from nanodepth.training.settings import as_kind, find
from nanodepth.training.start import differences, filled_in, load_past
from nanodepth.wrapping import solvers


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
    seeds: int | str = 3        # how many, or which, such as 4-7
    more: str = ''              # settings of every run
    measures: tuple[str, ...] = ('loss', 'text', 'log_prob')
    # the measures in the tables; (): the loss, that on text alone, the last answers
    show: tuple[str, ...] = ()
    # the folder of the runs. rows.csv and compare.png in it are of the last call
    out: Path = Path('out/compare')


def read_options(argv):
    "The options. One word is a file that gives them, and the command line has the last say."
    named = {word.lstrip('-').partition('=')[0] for word in argv if word.startswith('-')}
    own = typing.get_type_hints(Options)
    of_runs = typing.get_type_hints(Config).keys() - own.keys() | {'seed', 'data'}
    if wrong := sorted(named & of_runs):
        raise Refused(f'--{wrong[0]} is a setting of a run: write it into an arm, in quotes behind '
                      'its config, or for all runs as --more=--NAME=VALUE. (Which seeds are '
                      'trained is --seeds. Data to measure on stand in a file of arms.)')
    options = read(Options, argv, ['lines'])
    if len(options.lines) > 1:
        names = [' '.join(Path(word).stem if word.endswith('.py') else word
                          for word in line.split()) for line in options.lines]
        if len({*names}) < len(names):
            raise Refused('two arms have one name: give two that differ')
        return replace(options, arms=dict(zip(names, options.lines)))
    file = options.lines[0]
    try:
        values = config_file(file, own, READ)
        require(values.get('arms'), 'it gives none')
    except Refused as error:
        raise Refused(f'{file} is no file of arms ({error}): to compare two configs, name two')
    values = dict(out=Path('out') / Path(file).stem) | values
    return replace(options, **{key: value for key, value in values.items() if key not in named})


def seeds_of(text):
    "'3' is 0, 1, 2, and '4-7' is 4, 5, 6, 7."
    match = re.fullmatch(r'(\d{1,4})(?:-(\d{1,4}))?', text)
    first, last = (0, -1) if not match else (
        (int(match[1]), int(match[2])) if match[2] else (0, int(match[1]) - 1))
    if last < first:
        raise Refused(f'--seeds={text} must be how many, such as 3, or which, such as 4-7')
    return range(first, last + 1)


# ----------------------------------------------------------------------------------------- the arms

@dataclass
class Arm:
    words: list[str]            # of its command, with {name} where another arm's folder will stand
    is_cut: bool                # it makes a model that is not asked
    flops: str | None           # the arm whose FLOPs it has
    begins: set[str]            # the arms from whose models it begins
    partner_of: str | None      # the arm of which it is a longer or shorter run, itself no partner


SCHEDULE = '--decay_steps', '--warmup_steps'       # with these alone changed, an arm is a partner


def split(line):
    "The words of a line; a setting that is looked at here is one word."
    words = []
    with refusing(ValueError, why=lambda error: f'{line}: {error}'):
        for word in shlex.split(line):
            if words and words[-1] in ('--flops', '--seed', '--out_dir', *SCHEDULE):
                words[-1] += f'={word}'
            else:
                words.append(word)
    return words


def words_of(name, lines, within=()):
    "The words of an arm's line, in which another arm's name at the beginning is that one's words."
    first, *others = split(lines[name]) or ['']
    if first in lines and first not in ('cut', *within):
        return [*words_of(first, lines, (*within, name)), *others]
    if first != 'cut' and not first.startswith('--') and not first.endswith('.py'):
        raise Refused(f'{name}: {first!r} is no config, no other arm and not `cut`'
                      f'{nearest(first, {*lines} - {name})}')
    return [first, *others]


def read_arm(name, lines):
    words = words_of(name, lines)
    is_cut = words[0] == 'cut'
    flops = [word[8:] for word in words if word.startswith('--flops=')]
    words = [word for word in words[is_cut:] if not word.startswith('--flops=')]
    begins = {*re.findall(r'\{([^{}]+)\}', ' '.join(words))} - {'seed'}
    for other in begins | {*flops}:
        check_choice(f'{name}: the arm', other, lines)
    first, *own = split(lines[name])
    is_partner = flops and first in lines and first != name and all(
        word.partition('=')[0] in ('--flops', *SCHEDULE) for word in own)
    partner_of = (read_arm(first, lines).partner_of or first) if is_partner else None
    return Arm(words, is_cut, flops[-1] if flops else None, begins, partner_of)


class Arms(dict):
    "{name: Arm}, each behind those that it needs."

    def __init__(self, lines, out, more=(), partners=False, against={}, seed=0):
        self.out, self.more = out, [*more]
        self.added = set()      # the partners that nobody has written
        self.verdicts = {}      # {one of them: why it is not trained, or None}
        arms = {name: read_arm(name, lines) for name in lines}
        try:
            order = [*graphlib.TopologicalSorter({
                name: [other for other in lines if other in (*arm.begins, arm.flops)]
                for name, arm in arms.items()}).static_order()]     # (of a set, by chance)
        except graphlib.CycleError as error:
            raise Refused(f'{", ".join(error.args[1])}: each needs another one first') from None
        super().__init__({name: arms[name] for name in order})
        if not self.trained():
            raise Refused('no arm is trained: an arm is a config with settings')
        for name in self.trained():         # what can be known before the first run is refused here
            open_data(self.config(name, seed)[0])
            if not self.waits(name):
                planned(self.argv(name, seed)[0])
        self.first = next(name for name in lines if not arms[name].is_cut)
        for name in self.trained() if partners else ():
            if against.get(name, self.first) == self.first and name not in self.family(self.first):
                self.add_partner(name, seed)

    def waits(self, name):
        "Has another model to be made before it is known what an arm does?"
        arm = self[name]
        return bool(arm.begins or arm.flops and self.waits(arm.flops))

    def trained(self):
        return [name for name, arm in self.items() if not arm.is_cut]

    def config(self, name, seed=0, files=None):
        """(the settings as an arm's line has them, the words for them with the folders of this
        seed). files: as in `read`."""
        words = [re.sub(r'\{([^{}]+)\}', lambda match: str(
            seed if match[1] == 'seed' else self.folder(match[1], seed)), word)
            for word in self[name].words]
        if self[name].is_cut:
            return read(cut.Options, words, ['run', 'shape']), words
        # a line's own settings have the last say
        configs = [word for word in words if word[0] != '-' and word.endswith('.py')]
        own = [word for word in words if word not in configs]
        if any(word.partition('=')[0] in ('--seed', '--out_dir') for word in (*self.more, *own)):
            raise Refused(f'{name}: which seeds are trained is --seeds, and where is --out, so no '
                          'line sets them')
        words = [*configs, *self.more, *own, f'--seed={seed}']
        return read(Config, words, files=files), words

    def folder(self, name, seed):
        """Its run's, by what the files say now. It is named by all settings, with the sources of
        functions among them, and by the texts of the book, of all solvers, of the configs and of
        what they import. What it begins from counts, too: {name} in a line is such a folder, and of
        any other parent the files are read. Of an arm with another one's FLOPs the steps count, and
        not the other one, as soon as they are known."""
        files = {*map(nanodepth.file_of, nanodepth.BOOK), Path(solvers.__file__),
                 Path(authors.__file__)}
        config, _ = self.config(name, seed, files)
        made = [self.folder(other, seed) for other in self[name].begins]
        if not self[name].is_cut:
            files |= data_files(config)
        files = stamps(files)
        parent = config.run if self[name].is_cut else config.init_from
        if parent and not any(parent.startswith(str(folder)) for folder in made):
            files += files_of(parent)
        flops = self[name].flops
        if flops and not self.waits(name):
            config, flops = self.argv(name, seed)[0], None
        left_out = FREE - {'data', 'keep_every', 'keep_stages'}     # what another one may need
        if not self[name].is_cut or '--seed={seed}' in self[name].words:
            left_out |= {'seed'}        # all seeds of an arm have equal letters
        settings = vars(config) if self[name].is_cut else as_written(config)
        settings = {key: value for key, value in settings.items() if key not in left_out}
        if flops:
            made.append(self.folder(flops, seed))
            settings['flops'] = made[-1]
        # wherever the files are; of one name they stand in the order of their folders
        files.sort(key=lambda each: (Path(each[0]).name, os.path.abspath(each[0])))
        hashes = [(Path(file).name, hash_once(file, *stamp)) for file, *stamp in files]
        said = json.dumps([name, settings, hashes], default=str, ensure_ascii=False)
        for folder in made:
            said = said.replace(str(folder), folder.name.rpartition('-')[0])
        letters = hashlib.sha256(said.encode()).hexdigest()[:8]
        short = re.sub(r'[^\w.=+-]+', '_', name)[:30]
        return self.out / f'{short}-{letters}-{seed}'

    def argv(self, name, seed):
        """(the settings of a run, the words of its command but for its folder). The models that it
        begins from must be there."""
        config, words = self.config(name, seed)
        if flops := self[name].flops:
            settings = self.with_flops(name, config, self.cost(flops, seed))
            words = words + [f'--{key}={value}' for key, value in settings.items()]
            config = replace(config, **settings)
        return config, words

    def cost(self, name, seed):
        "The FLOPs of an arm, and of what it begins from."
        config, _ = self.argv(name, seed)
        return planned(config) + inherited(config)

    def with_flops(self, name, config, flops):
        """The settings with which a config costs so many FLOPs: its steps, its own warm-up if that
        fits, and a cool-down in proportion, unless the line has one in steps. In a model that grows
        the cost is not quite in proportion to the steps, so it is tried again, and at last beside
        what came out."""
        wanted = flops - inherited(config)
        words = *self.more, *self[name].words
        decays = [word[14:] for word in words if word.startswith('--decay_steps=')]
        keeps = decays and isinstance(as_kind(decays[-1], int | float), int)

        def at(steps):
            warmup, decay = config.warmup_steps, config.decay_steps
            own = decay if keeps else max(round(decay * steps / config.steps), min(1, decay))
            return replace(config, steps=steps, decay_steps=own, warmup_steps=(
                warmup if warmup + own <= steps else warmup * steps // config.steps))

        @functools.cache
        def cost(steps):
            return planned(at(steps))

        def missed(steps):
            with contextlib.suppress(Refused):          # so few may be too few to grow in
                return abs(cost(steps) - wanted) if steps else math.inf
            return math.inf
        steps = config.steps
        for _ in range(20):
            before, steps = steps, round(steps * wanted / cost(steps))
            if steps < 1:
                raise Refused(f'{name}: the FLOPs of {self[name].flops} pay for less than a step')
            if steps == before:
                break
        while (nearer := min(steps, steps - 1, steps + 1, key=missed)) != steps:
            steps = nearer
        return {key: getattr(at(steps), key) for key in ('steps', 'warmup_steps', 'decay_steps')}

    def add_partner(self, name, seed):
        "The first arm with another one's FLOPs."
        partner = f'{self.first} with the FLOPs of {name}'
        if partner in self:
            return
        root = self[self.first].partner_of or self.first
        self[partner] = replace(self[self.first], flops=name, partner_of=root)
        self.added.add(partner)
        try:
            if not self.waits(partner):
                self.argv(partner, seed)
        except Refused as why:      # what the first arm begins from may have cost more
            del self[partner]
            say(f'{partner} is not trained: {why}')

    def family(self, name):
        "An arm, and all that are longer or shorter runs of the same."
        root = lambda name: self[name].partner_of or name
        return [name, *(other for other in self if other != name and root(other) == root(name))]

    def paid_for(self, name):
        "The arm that is no partner whose FLOPs an arm has."
        return self.paid_for(self[name].flops) if self[name].partner_of else name

    def judge(self, name, seed):
        "An added partner, by the first seed in which all that it needs is there, for all seeds."
        self.verdicts[name] = why = self.verdict(name, seed)
        if why is not None:
            raise NoPartner(why)

    def verdict(self, name, seed):
        """Why an added partner is not trained: in words, or '' if another one of its family has the
        FLOPs. None: it is trained."""
        of = self[name].flops
        if is_published(self.config(name, seed)[0]) != is_published(self.config(of, seed)[0]):
            return 'what a published model has cost is not known'
        wanted, is_drawn = self.cost(of, seed), self.is_drawn(name, seed)
        for other in self.family(name)[1:]:
            if other not in self.added or self.verdicts.get(other, '') is None:     # it is trained
                with contextlib.suppress(Refused):      # what that begins from may not be there
                    if is_drawn or self.is_drawn(other, seed):      # it is asked what pays for it
                        has_them = self.cost(self[other].flops or other, seed) == wanted
                    else:
                        has_them = is_same(wanted, self.cost(other, seed))
                    if has_them:
                        return ''
        if is_drawn:
            return (f'r is drawn, so each seed has other FLOPs: add an arm '
                    f'"{shlex.quote(self.first)} --flops={shlex.quote(of)}"')
        if not is_same(wanted, self.cost(name, seed)):
            return 'whole steps miss these FLOPs by more than 2%'
        return None

    def is_drawn(self, name, seed):
        "Do its FLOPs depend on the seed, or those of an arm by which its own are known?"
        arm = self[name]
        if any(self.is_drawn(other, seed) for other in (*arm.begins, arm.flops) if other):
            return True
        config, _ = self.config(name, seed)
        return not arm.is_cut and len({planned(replace(config, seed=s)) for s in range(4)}) > 1


def data_files(config):
    "What says which data a run reads: made anew, they are others."
    folders = folders_of(config.data) + folders_of(config.cooldown_data or [])
    return {place / f'{name}.json' for folder in folders for place in
            (find(folder), *parts_of(folder)) for name in ('train', 'val', 'mixture')}


@functools.lru_cache(None)
def hash_once(file, size, changed):
    "The hash of a file that has not changed meanwhile: a parent may have gigabytes."
    return hash_of(file)


def inherited(config):
    "The FLOPs of what a run begins from, but for those of a published model."
    return checkpoint.spent_on(checkpoint.state_of(config.init_from)) if config.init_from else 0


def is_published(config):
    "Does a run begin from a model of which nobody knows what it has cost?"
    path = config.init_from
    return bool(path) and math.isnan(checkpoint.cost_of(checkpoint.state_of(path)))


# -------------------------------------------------------------------------------------- what is run

class Left(Exception):
    "A run that is not there, and why: it has diverged, or another call trains it."


class NoPartner(Left):
    "These FLOPs pay for none, or without a word: another one of its family has them."


def make(arms, name, seed, made, folder):
    "An arm's model, made in its folder unless it is there whole. `made`: the (arm, seed) so far."
    edited = f'{name} was edited after this command had begun: start it again'
    if arms.folder(name, seed) != folder:
        raise Refused(edited)
    needs = arms[name].begins | ({arms[name].flops} if arms[name].partner_of else set())
    if missing := [other for other in sorted(needs) if (other, seed) not in made]:
        raise Left(f'{missing[0]}, which it needs, is not there')
    try:
        if name in arms.added - arms.verdicts.keys():
            arms.judge(name, seed)
        config, words = arms.argv(name, seed)
        if arms[name].is_cut and not checkpoint_file(folder).exists():
            with contextlib.redirect_stdout(io.StringIO()):
                cut.main([*words, f'--out={folder}'])
    except Refused as why:
        kind = NoPartner if name in arms.added else Left
        raise kind(str(why).removeprefix(f'{name}: ')) from None
    if arms[name].is_cut:
        return folder
    if not is_whole(folder, config):
        tqdm.write(f'training {name}, seed {seed}, for {config.steps:,} steps', file=sys.stderr)
        train(words, folder)
        if arms.folder(name, seed) != folder:
            raise Refused(edited)
    return folder


def is_whole(folder, config):
    "Has this run ended? One whose settings or plan were others is refused, as train.py does."
    if not checkpoint_file(folder).exists():
        return False
    model, past = load_past(folder)
    if config.init_from:        # the letters have it, wherever these folders are now
        config = replace(config, init_from=past.config['init_from'])
    config = filled_in(config, model, past)
    if differ := differences(as_written(config), past.config, but=FREE):
        raise Refused(f'{folder} holds a run with {differ}: choose another out_dir')
    return past.step == config.steps


@contextlib.contextmanager
def sigterm_is_ctrl_c():
    "In here only: a pool of processes, as lm-eval has, waits forever for one that SIGTERM spared."
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@sigterm_is_ctrl_c()
def train(words, folder):
    """train.py in a process of its own. Its line, and what it says, stand in a file in the folder.
    Ctrl-C and SIGTERM end it at its step, and then this one."""
    told = folder / 'train.txt'
    told.parent.mkdir(parents=True, exist_ok=True)
    # by this package, and by no file of the current folder that is called like a module
    paths = [str(Path(nanodepth.__file__).parents[1]), os.environ.get('PYTHONPATH')]
    env = dict(PYTHONSAFEPATH='1', PYTHONPATH=os.pathsep.join(filter(None, paths)))
    with open(told, 'ab', buffering=0) as said:
        said.write(f'train {shlex.join(words)}\n'.encode())
        begin = said.tell()
        process = subprocess.Popen([sys.executable, '-m', 'nanodepth', 'train', *words,
                                    f'--out_dir={folder}'], stdout=said, stderr=said,
                                   start_new_session=True, env=os.environ | env)
    try:
        process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise
    if process.returncode in (-signal.SIGINT, -signal.SIGTERM, 130, 143):       # it was stopped
        raise KeyboardInterrupt
    if process.returncode < 0:
        raise Left(f'it was killed by {signal.Signals(-process.returncode).name} ({told})')
    if process.returncode:
        lines = told.read_bytes()[begin:].decode(errors='replace').splitlines() or ['silently']
        own = [line for line in lines if line.startswith('train: ')]    # (two calls write there)
        raise Left(f'{(own or lines)[-1]} ({told})')


# ------------------------------------------------------------------------------------ what is asked

def ask(options, arms, name, seed, folder, ways, first):
    "(the Subject of a run, its rows). Where a later arm alone cannot be asked, it is left out."
    try:
        subject = Subject(folder, options, first)
        return subject, subject.rows(ways, folder / 'notes.jsonl', group=name, run=f'{name}-{seed}',
                                     steps=subject.state['step'],
                                     flops=checkpoint.spent_on(subject.state))
    except Refused as why:
        if first is None:
            raise
        raise Left(str(why)) from None


def ways_of(options, name=None):
    ways = [Way(), *read_ways(options)]
    lines = options.ways.get(name, ())
    for line in [lines] if isinstance(lines, str) else lines:
        ways += read_ways(read(Ways, shlex.split(line)))
    return [*{str(way): way for way in ways}.values()]      # what is named twice is one way


def bases(options, arms):
    "{arm: what it is compared with}: the first, or what `against` says, and that one's family."
    of = {name: arms.family(options.against.get(name, arms.first)) for name in arms.trained()}
    return {name: family[:family.index(name) if name in family else None]
            for name, family in of.items() if name != family[0] and name not in arms.added}


def draw(options, arms, folders, rows):
    """Loss and answers against what is known of training FLOPs and tokens. A partner is dashed, in
    the colour of the arm whose FLOPs it has."""
    groups, rows_of, data = {}, set(), set()
    for (name, seed), folder in folders.items():
        log = log_of(folder)
        groups.setdefault(name, []).append(log)
        log[-1]['step'] = groups[name][0][-1]['step']       # r is drawn, and so are some ends
        run = read_run(folder)
        rows_of.add(tuple(run['config'][key] for key in ('context', 'batch_size', 'eval_batches')))
        data.add((seed, json.dumps(run['data']['val'])))
    if len(rows_of) > 1 or len(data) > len({seed for seed, _ in data}):
        print('a curve in the picture is of the rows that its arm was validated on, which differ')
    are_known = {not math.isnan(row['training_flops']) for row in rows}
    costs = ['flops'] * (len(are_known) == 1)       # of published models alone, those since
    costs += ['tokens'] * (not any(math.isnan(row['tokens']) for row in rows))
    kinds = ['loss', *[kind for kind in kinds_of(groups) if kind != 'text'][-1:]]
    show(options.out / 'compare.png', draw_runs, groups, kinds, costs or ['step'],
         {name: arms.paid_for(name) for name in groups})


def main(argv=None):
    options = read_options(argv)
    seeds = seeds_of(str(options.seeds))
    machine = [f'--{name}={value}' for name in ('device', 'dtype')
               if (value := getattr(options, name)) != 'auto']
    measures_of(options)
    # (arms bring solvers of their own, and a way's may have such a name)
    ways, of_all = {name: ways_of(options, name) for name in options.ways}, ways_of(options)
    arms = Arms(options.arms, options.out, [*split(options.more), *machine], options.partners,
                options.against, seeds[0])
    for name in (*options.ways, *options.against, *options.against.values()):
        check_choice('the arm', name, arms.trained())
    jobs = [(name, seed) for seed in seeds for name in arms]
    folders = {job: arms.folder(*job) for job in jobs}      # by what the files say now
    rows, made, asked, left, first, has_failed = [], {}, {}, [], None, False
    for name, seed in tqdm(jobs, 'runs', unit='run'):
        if arms.verdicts.get(name) is not None:
            continue            # the first seed has said why
        try:
            folder = made[name, seed] = make(arms, name, seed, made, folders[name, seed])
            if arms[name].is_cut:
                continue
            its_ways = ways.get(name, of_all)
            subject, its_rows = ask(options, arms, name, seed, folder, its_ways, first)
        except Left as why:
            if str(why):
                left.append(f'{name}, seed {seed}, is in no mean: {why}')
                tqdm.write(left[-1], file=sys.stderr)
            has_failed |= not isinstance(why, NoPartner)
            continue
        first = first or subject
        asked[name, seed] = folder
        rows += its_rows
    if rows:
        measures = list(dict.fromkeys(row['measure'] for row in rows))
        answers = [row['measure'] for row in rows if row['kind'] == 'share']
        usual = [name for name in ('loss', 'text', *answers[-1:]) if name in measures]
        # 'rank' is 'rank, depth 0', 'rank, depth 1', ..., too
        of_name = {name: [each for each in measures if f'{each},'.startswith(f'{name},')]
                   for name in options.show}
        shown = [each for name in of_name for each in of_name[name]]
        for name in (*options.margins, *(name for name in of_name if not of_name[name])):
            check_choice('the measure', name, measures)
        write_csv(of_one_kind(rows), options.out / 'rows.csv')
        print_differences(rows, bases(options, arms), shown or usual or measures[:1],
                          options.margins)
        draw(options, arms, asked, rows)
    print(*left, sep='\n', end='\n' * bool(left))
    if has_failed:
        raise SystemExit(1)
