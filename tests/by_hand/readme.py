"""Run what README, COURSE and CHECKPOINT tell people to type, as it is written, in a new clone.

Lines whose comment names a network are left out, and torchrun's; of `make` only the
training is run; out/smollm2, data/pydoc and the questions are those of `make smollm2`, notes/ holds
texts of this repo. Prints what each line took beside what the text says.

Usage:
    python tests/by_hand/readme.py              # make readme: two hours
    python tests/by_hand/readme.py 'smollm2|out/cut'   # only the lines that match
"""
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXTS = 'README.md', 'docs/COURSE.md', 'docs/CHECKPOINT.md'


def lines(text):
    "{a line of a shell block, or a whole Python block: its comment}, in order."
    found = {}
    for kind, block in re.findall(r'```(sh|python)\n(.*?)```', text, flags=re.S):
        if kind == 'python' and 'import' in block:
            found[block] = ''
        for line in block.splitlines() if kind == 'sh' else []:
            line, comment = (part.strip() for part in f'{line}  #'.split('  #')[:2])
            is_setup = line.startswith(('#', 'git ', 'make ', 'pip', 'source', 'python3 -m venv',
                                        '.venv'))
            is_elsewhere = line.startswith('torchrun') or '(a network)' in comment
            if line and not is_setup and not is_elsewhere:
                found[line] = comment
    return found


def run(line, folder):
    "(exit status, the last line that was said)"
    argv = [sys.executable, '-c', line] if '\n' in line else ['bash', '-c', line]
    path = f'{Path(sys.executable).parent}:{os.environ["PATH"]}'
    env = os.environ | dict(PATH=path, BROWSER='true', PYTHONPATH=str(folder))
    done = subprocess.run(argv, cwd=folder, env=env, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, text=True, timeout=3 * 3600)
    return done.returncode, (done.stdout.strip().splitlines() or [''])[-1]


def main(only=''):
    folder, failed = Path(tempfile.mkdtemp()) / 'clone', 0
    subprocess.run(['git', 'clone', '-q', ROOT, folder], check=True)
    for made in ('data/evals/questions', 'data/pydoc', 'out/smollm2'):
        shutil.copytree(ROOT / made, folder / made, dirs_exist_ok=True)
    (folder / 'notes').mkdir()
    for path in ROOT.glob('docs/*.md'):
        shutil.copy(path, folder / 'notes' / f'{path.stem}.txt')
    for line, comment in lines(''.join((ROOT / text).read_text() for text in TEXTS)).items():
        if not re.search(only, line):
            continue
        began = time.monotonic()
        code, said = run('python train.py config/lidas.py' if line == 'make' else line, folder)
        print(f'{time.monotonic() - began:6.0f} s  {line.splitlines()[0]}   # {comment}',
              flush=True)
        if code:
            failed += 1
            print(f'          exit status {code}: {said}', flush=True)
    print(f'{failed} lines failed; the clone is {folder}')
    return failed > 0


if __name__ == '__main__':
    sys.exit(main(*sys.argv[1:]))
