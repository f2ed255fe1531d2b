"""The command train: a config and what is said beside it on the command line become a run."""
import sys

from nanodepth import ROOT, train as train_file
from nanodepth.commands import cost
from nanodepth.common.errors import Refused
from nanodepth.common.options import docstring_of, given, read
from nanodepth.running import refuse
from nanodepth.running.plan import MODEL_SETTINGS
from nanodepth.train import Config

USAGE = 'usage: python train.py CONFIG [--name=value ...] [--dry_run [--gpus=8] [--mfu=0.4]]'


def read_config(argv, cls=Config):
    "A config file and the settings after it. What init_from decides may not be set beside it."
    values = given(cls, argv)
    decided = MODEL_SETTINGS & values.keys() if values.get('init_from') else ()
    for name in sorted(decided):
        raise Refused(f'{name}={values[name]} has no effect beside init_from='
                      f'{values["init_from"]}: that checkpoint decides the shape of the model, so '
                      f'leave {name} out')
    config = cls(**values)
    refuse.what_is_void(config, [arg.removeprefix('--').partition('=')[0] for arg in argv])
    return config


def main(argv=None):
    argv = sys.argv[1:] if argv is None else argv
    if not argv:
        print(USAGE + '      (--help lists the settings)')
        for path in sorted((ROOT / 'config').glob('[!_]*.py')):
            print(f'  {f"config/{path.name}":44}{docstring_of(path).partition(chr(10))[0]}')
        raise SystemExit(2)
    if {'-h', '--help'} & set(argv):
        read(Config, argv, f'{USAGE}\n\n{train_file.__doc__ or ""}')
    if any(arg.partition('=')[0] == '--dry_run' for arg in argv):
        return cost.main(argv, read_config)
    config = read_config(argv)
    stopped = train_file.train(config)
    if stopped:         # make or a scheduler must not take the run for finished
        raise SystemExit(128 + stopped)
