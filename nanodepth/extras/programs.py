"""Programs of ours that a study runs one after the other, and the commit that it runs."""
import os
import shutil
import subprocess
import sys

from nanodepth import ROOT
from nanodepth.common.errors import Refused


def python(*words, **environment):
    done = subprocess.run([sys.executable, *map(str, words)], cwd=ROOT,
                          env=os.environ | environment)
    if done.returncode:
        raise Refused(f'{" ".join(map(str, words))} ended with status {done.returncode}')


def commit():
    "What git says of this code; '' where there is no git."
    if not shutil.which('git'):
        return ''
    return subprocess.run(['git', 'describe', '--always', '--dirty'], cwd=ROOT,
                          capture_output=True, text=True).stdout.strip()
